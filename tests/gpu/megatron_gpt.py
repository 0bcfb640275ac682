"""Small GPT models in Megatron's schedules, DDP and distributed optimizer, trained with the backends that a test compares.

Importing this imports Megatron (seconds).
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from tests.gpu.megatron_layers import EXPERTS, base_config, chosen_backend, distance, use_groups

SEQUENCE, VOCABULARY, MICROBATCHES, STEPS, LAYERS = 128, 64, 4, 6, 2


@dataclasses.dataclass(frozen=True)
class Run:
    """One training: ``moved``: from an initial embedding moved by one unit in the last place."""

    backend: str
    dispatcher: str = "alltoall"
    moved: bool = False
    distributed: bool = True
    recompute: tuple[tuple[str, Any], ...] = ()


FULL = (("recompute_granularity", "full"), ("recompute_method", "uniform"), ("recompute_num_layers", 1))
MOE = (("recompute_granularity", "selective"), ("recompute_modules", ["moe"]))


def build(run: Run, device: str, pp_size: int, seed: int) -> tuple[Any, Any]:
    """The model of this rank's pipeline stage under DDP, and its optimizer."""
    changes = {"num_layers": LAYERS, "pipeline_model_parallel_size": pp_size, "pipeline_dtype": torch.bfloat16, **dict(run.recompute)}
    config = TransformerConfig(**base_config(device, torch.bfloat16, moe_token_dispatcher_type=run.dispatcher, **changes))
    # The output layer's own fusion needs APEX; expert weights do not.
    config.gradient_accumulation_fusion = False
    if device == "cuda":
        spec = get_gpt_layer_with_transformer_engine_spec(num_experts=EXPERTS, moe_grouped_gemm=True)
    else:
        spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False, normalization="RMSNorm")
    with chosen_backend(run.backend, SEQUENCE):
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        )
    model = model.to(device=device, dtype=torch.bfloat16)
    expert_rank, stage = parallel_state.get_expert_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if parameter.dim() > 1:
                own = expert_rank if ".experts." in name else 0
                generator = torch.Generator().manual_seed(seed + 100_000 * stage + 10_000 * own + number)
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
            if run.moved and name.endswith("word_embeddings.weight"):
                parameter.data.view(torch.int16).add_(torch.where(parameter.data == 0, 0, 1).to(torch.int16))
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=run.distributed,
        overlap_param_gather=run.distributed,
        use_distributed_optimizer=run.distributed,
        bucket_size=200_000,
    )
    ddp = DistributedDataParallel(config, ddp_config, model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            clip_grad=1.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=run.distributed,
            overlap_param_gather=run.distributed,
        ),
        [ddp],
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = ddp.no_sync
    if run.distributed:
        config.grad_sync_func = ddp.start_grad_sync
        config.param_sync_func = ddp.start_param_sync
        if pp_size > 1:
            config.no_sync_func = ddp.no_sync
    return ddp, optimizer


def expert_gradients(model: Any) -> dict[str, Tensor]:
    """FP32 copies of the experts' ``main_grad``: one vector for each layer and linear, of all experts that this rank holds."""
    found: dict[str, list[Tensor]] = {}
    for name, parameter in model.module.named_parameters():
        if ".experts." in name:
            layer, rest = name.split("layers.")[1].split(".", 1)
            found.setdefault(f"layer {layer} {'fc1' if 'linear_fc1' in rest else 'fc2'}", []).append(parameter.main_grad.float().flatten())
    return {key: torch.cat(parts) for key, parts in found.items()}


def train(run: Run, device: str, pp_size: int, seed: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of all microbatches of this rank's data, step by step (on the last pipeline stage, else []), and the first step's gradients."""
    model, optimizer = build(run, device, pp_size, seed)
    if run.backend == "mok":
        layers = [m for m in model.modules() if type(m).__name__ == "MoKMoELayer"]
        assert len(layers) == LAYERS // pp_size
    losses: list[torch.Tensor] = []
    gradients: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(seed + 17 + parallel_state.get_data_parallel_rank())
    positions = torch.arange(SEQUENCE, device=device)[None]
    mask = torch.ones(SEQUENCE, SEQUENCE, device=device).tril().logical_not()[None, None]

    def forward_step(data: Any, model: Any) -> Any:
        # Every stage draws the microbatch; a rule that can be learnt: tokens count upwards from a random start.
        ids = torch.randint(VOCABULARY, (1, 1), generator=generator)
        for _ in range(SEQUENCE):
            ids = torch.cat([ids, (ids[:, -1:] + 1) % VOCABULARY], 1)
        ids = ids.to(device)
        output = model(ids[:, :-1], positions, mask, labels=ids[:, 1:])

        def loss_of(losses_of_tokens: torch.Tensor) -> Any:
            loss = losses_of_tokens.float().mean()
            losses.append(loss.detach())
            return loss, {"loss": loss.detach()}

        return output, loss_of

    for step in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=None,
            model=[model],
            num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=False,
        )
        if step == 0:
            gradients = expert_gradients(model)
        successful, _, _ = optimizer.step()
        assert successful
    if run.distributed:
        model.disable_forward_pre_hook()
    return [float(loss) for loss in losses], gradients


def compare_gradients(stocks: list[dict[str, Tensor]], runs: dict[str, dict[str, Tensor]], where: str) -> dict[str, float]:
    """Largest relative distance of each MoK run's gradients from the first stock run's, over the floor of the same layer and linear.

    Adam hides a gradient's scale, so that losses cannot show a doubled one, nor one of the last microbatch alone. Those are 1 and about
    0.8 away from stock. The floor, the largest distance between two stock runs, is 0.02 to 0.09: a few roundings of 2^-9, and tokens that
    a rounding sends to another expert. MoK rounds as stock does, and the moved stock runs start farther apart than rounding takes them:
    1.5 floors leave room for a token that only MoK's rounding moves. All experts of a linear together, because one such token can be much
    of the gradient of an expert with few; megatron_layers compares each expert, on tokens that rounding does not move.
    """
    # Then each rank holds whole gradients: the distributed optimizer scatters nothing.
    assert parallel_state.get_expert_data_parallel_world_size() == 1
    found = dict.fromkeys(runs, 0.0)
    for key, stock in stocks[0].items():
        floor = max(distance(a[key], b[key]) for a, b in itertools.combinations(stocks, 2))
        assert floor > 0
        for name, gradients in runs.items():
            off = distance(gradients[key], stock)
            assert off <= 1.5 * floor, f"{where}, {name}, {key}: gradients {off:.3e} from AllToAll's, {off / floor:.2f} floors of {floor:.2e}"
            found[name] = max(found[name], off / floor)
    return found


def compare(device: str, ep_size: int, pp_size: int, seed: int) -> dict[str, float]:
    """Largest distance of each MoK run from stock, of losses and of gradients, over the floor: how far stock runs are from each other.

    The floor is what rounding does to this very training: another dispatcher sums in another order, a moved embedding starts one unit
    in the last place away. Two correct runs differ by about as much, some seeds' by less: so it is taken over all pairs of four stock runs.
    4 floors is the demo's bound too.
    """
    use_groups(ep_size, pp_size)
    allgather = Run("megatron", dispatcher="allgather")
    stock_runs = [Run("alltoall"), allgather, dataclasses.replace(allgather, moved=True), Run("alltoall", moved=True)]
    stocks, stock_gradients = zip(*(train(run, device, pp_size, seed) for run in stock_runs), strict=True)
    runs = {"mok": Run("mok"), "mok, recompute full": Run("mok", recompute=FULL)}
    if pp_size == 1:
        runs |= {"mok, recompute moe": Run("mok", recompute=MOE), "mok, plain": Run("mok", distributed=False)}
    trained = {name: train(run, device, pp_size, seed) for name, run in runs.items()}
    where = f"EP {ep_size}, PP {pp_size}"
    gradients = compare_gradients(list(stock_gradients), {name: found for name, (_, found) in trained.items()}, where)
    found = {f"{name}, gradients": floors for name, floors in gradients.items()}
    stock = stocks[0]
    if not stock:
        return found
    assert len(stock) == STEPS * MICROBATCHES
    floor = max(abs(a - b) for one, other in itertools.combinations(stocks, 2) for a, b in zip(one, other, strict=True))
    assert stock[-1] < stock[0] - 0.5, "the model learns, so that a lost gradient shows"
    assert floor > 0
    for name, (run, _) in trained.items():
        found[name] = max(abs(a - b) for a, b in zip(stock, run, strict=True)) / floor
        assert 0 < found[name] <= 4, f"{where}, {name}: losses {found[name]:.2f} floors of {floor:.2e} from AllToAll's: {run}, {stock}"
    return found


def compare_all(device: str, world_size: int, seed: int) -> dict[str, dict[str, float]]:
    found = {f"EP {world_size}": compare(device, world_size, 1, seed)}
    if world_size == 2:
        found["PP 2"] = compare(device, 1, 2, seed)
    dist.barrier()
    return found
