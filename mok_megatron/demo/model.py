"""The demo's model, data and optimizer: all Megatron-Core's own, none of it knows of MoK.

Importing this module imports Megatron-Core (seconds), so only the training processes do.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

from mok_megatron.demo.settings import DemoSettings
from mok_megatron.stock_cpu import CPU_CONFIG

_LOCAL_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


def build_model(settings: DemoSettings, dispatcher: str, device: str) -> DistributedDataParallel:
    """The GPT MoE model under Megatron's DistributedDataParallel, which owns the fp32 gradient buffers (``main_grad``).

    Args:
        settings: sizes, precision and seed.
        dispatcher: Megatron's ``moe_token_dispatcher_type``: ``alltoall`` or ``allgather``.
        device: ``cpu`` or ``cuda``.
    """
    bf16 = settings.dtype == "bf16"
    config = TransformerConfig(
        num_layers=settings.num_layers,
        hidden_size=settings.hidden_size,
        num_attention_heads=settings.hidden_size // 32,
        ffn_hidden_size=settings.ffn_hidden_size,
        moe_ffn_hidden_size=settings.ffn_hidden_size,
        num_moe_experts=settings.num_experts,
        moe_router_topk=settings.topk,
        moe_router_pre_softmax=settings.topk == 1,  # a softmax over the one chosen expert is always 1; Megatron refuses it
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-2,
        moe_router_dtype="fp32",
        moe_token_dispatcher_type=dispatcher,
        expert_model_parallel_size=settings.ranks,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        pipeline_dtype=torch.bfloat16 if bf16 else torch.float32,
        **CPU_CONFIG,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(num_experts=settings.num_experts, moe_grouped_gemm=False, normalization="RMSNorm"),
        vocab_size=settings.vocab_size,
        max_sequence_length=settings.seq_length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    if bf16:
        model.bfloat16()
    model.to(device)
    _initialise(model, settings)
    return DistributedDataParallel(
        config=config,
        ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False),
        module=model,
    )


def _initialise(model: GPTModel, settings: DemoSettings) -> None:
    """Draws every matrix from a generator of its own, seeded by its name with the expert's *global* number.

    Megatron's CPU initialisation gives expert e of each rank the same weights; this one gives each expert its own, the
    same ones whatever EP size or backend runs.
    """
    first_expert = parallel_state.get_expert_model_parallel_rank() * settings.num_experts // settings.ranks
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                continue  # norms keep their ones
            name = _LOCAL_EXPERT.sub(lambda match: f".experts.{first_expert + int(match.group(1))}.", name)
            generator = _generator(settings.seed, name)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def move_inputs_by_one_ulp(model: DistributedDataParallel, seed: int) -> None:
    """Moves every element of the input embedding by one unit in the last place of its dtype, up or down by a coin flip.

    Token ids cannot be moved by a little; the embedding rows are the smallest thing the first layer reads. Must run
    before the optimizer takes its fp32 copies.
    """
    weight = next(p for n, p in model.named_parameters() if n.endswith("word_embeddings.weight"))
    step = torch.randint(0, 2, weight.shape, generator=_generator(seed, "ulp")) * 2 - 1
    integer = torch.int16 if weight.dtype == torch.bfloat16 else torch.int32
    with torch.no_grad():
        bits = weight.data.view(integer)
        bits += torch.where(weight.data == 0, 0, step.to(weight.device)).to(integer)


def build_optimizer(settings: DemoSettings, model: DistributedDataParallel) -> Any:
    """Megatron's own Adam: fp32 master weights where the model is bf16, gradient clipping, expert group apart."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.learning_rate,
        weight_decay=0.01,
        bf16=settings.dtype == "bf16",
        params_dtype=torch.bfloat16 if settings.dtype == "bf16" else torch.float32,
        use_distributed_optimizer=False,
        clip_grad=1.0,
    )
    return get_megatron_optimizer(config, [model])


def batches(settings: DemoSettings, device: str) -> Iterator[dict[str, torch.Tensor]]:
    """Endless microbatches of Megatron's mock dataset for this rank: int64 [micro_batch_size, seq_length] and a mask."""
    tokenizer = NullTokenizer(vocab_size=settings.vocab_size - 1)  # 0.16.1 adds one id for the end of a document
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    samples = settings.steps * settings.num_microbatches * settings.micro_batch_size * ranks
    config = GPTDatasetConfig(
        random_seed=settings.seed,
        sequence_length=settings.seq_length,
        split="1,0,0",
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=True,
        tokenizer=tokenizer,
    )
    dataset, _, _ = BlendedMegatronDatasetBuilder(MockGPTDataset, [samples, None, None], lambda: True, config).build()
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=settings.micro_batch_size,
        sampler=range(rank, samples, ranks),
        drop_last=True,
    )
    for batch in loader:
        yield {name: tensor.to(device) for name, tensor in batch.items()}


def forward_step(iterator: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Megatron's forward-step function: the model's per-token losses and the function that reduces them."""
    batch = next(iterator)
    losses = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return losses, partial(_mean_loss, batch["loss_mask"])


def _mean_loss(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = (losses.float() * mask).sum() / mask.sum()
    return loss, {"loss": loss.detach().clone()}


def moe_layers(model: torch.nn.Module) -> list[MoELayer]:
    return [module for module in model.modules() if isinstance(module, MoELayer)]
