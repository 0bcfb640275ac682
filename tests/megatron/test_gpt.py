"""A whole GPTModel in Megatron's own schedule, DDP and optimizer: MoK against AllToAll, with and without recomputation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

from mok_megatron import MoKConfig
from mok_megatron.megatron import layer as mok_layer
from tests.distributed import RankPool
from tests.megatron.helpers import chosen_backend, make_config, start_megatron

SEQUENCE, BATCH, VOCABULARY, MICROBATCHES, STEPS = 16, 2, 64, 3, 2


def build(backend: str, ep_size: int, **changes: Any) -> tuple[DistributedDataParallel, Any]:
    start_megatron(ep_size)
    config = make_config(ep_size, num_layers=2, moe_aux_loss_coeff=0.05, moe_router_dtype="fp32", normalization="RMSNorm", **changes)
    options = {"knobs": MoKConfig(timeout_seconds=30), "max_tokens_per_rank": SEQUENCE * BATCH} if backend == "mok" else {}
    with chosen_backend(backend, **options):
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False, normalization="RMSNorm"),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            position_embedding_type="rope",
        )
    first_expert = parallel_state.get_expert_model_parallel_rank() * 4 // ep_size
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            place = name
            if ".local_experts." in name:
                local = int(name.split(".local_experts.")[1].split(".")[0])
                place = name.replace(f".local_experts.{local}.", f".experts.{first_expert + local}.")
            generator = torch.Generator().manual_seed(sum(i * ord(c) for i, c in enumerate(place)))
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=1.0), [ddp])
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = ddp.no_sync
    return ddp, optimizer


def train(rank: int, backend: str, ep_size: int, changes: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of all microbatches, and the parameters after the last step."""
    model, optimizer = build(backend, ep_size, **changes)
    losses: list[float] = []
    generator = torch.Generator().manual_seed(17 + rank)
    positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
    mask = torch.ones(SEQUENCE, SEQUENCE).tril().logical_not().view(1, 1, SEQUENCE, SEQUENCE)

    def forward_step(data: Any, model: Any) -> Any:
        ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
        output = model(ids[:, :-1], positions, mask, labels=ids[:, 1:])

        def loss_of(losses_of_tokens: torch.Tensor) -> Any:
            loss = losses_of_tokens.float().mean()
            losses.append(float(loss))
            return loss, {"loss": loss.detach()}

        return output, loss_of

    for _ in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=None,
            model=[model],
            num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        optimizer.step()
    if backend == "mok":
        assert sum(isinstance(m, mok_layer.MoKMoELayer) for m in model.modules()) == 2
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def compare(rank: int, ep_size: int) -> None:
    expected, weights = train(rank, "alltoall", ep_size, {})
    losses, ours = train(rank, "mok", ep_size, {})
    assert len(losses) == MICROBATCHES * STEPS
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, weight in weights.items():
        # Adam's first steps divide by the gradient's magnitude: where it is nearly zero, its sign is noise.
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=2e-4, msg=lambda m, name=name: f"{name}: {m}")
    for changes in (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    ):
        again, recomputed = train(rank, "mok", ep_size, changes)
        assert again == losses, changes
        for name, weight in ours.items():
            assert torch.equal(recomputed[name], weight), (changes, name)


def test_gpt_on_one_rank() -> None:
    compare(0, 1)


def test_gpt_on_two_ranks(ranks2: RankPool) -> None:
    ranks2.run(compare, 2, timeout=200)
