"""Megatron's MoE layer with the backends that a test compares, on GPUs with Transformer Engine or on the CPU with Megatron's own linears.

Importing this imports Megatron (seconds). T tokens a rank, H hidden, I expert intermediate, E experts.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

from mok_megatron import MoKConfig
from mok_megatron.megatron import apply_mok_to_megatron, settings

HIDDEN, INNER, EXPERTS, TOPK, TOKENS, MICROBATCHES = 256, 192, 8, 4, 160, 3
MARGIN = 1e-3
"""Between a token's last chosen and first unchosen router score: FP32 and BF16 runs then choose the same experts."""


def start(rank: int, world_size: int, device: str, rendezvous: str) -> None:
    """torch.distributed over NCCL (GPU ``rank``) in place of the harness's gloo, or over gloo with Megatron on the CPU."""
    if device == "cuda":
        torch.cuda.set_device(rank)
        dist.destroy_process_group()
        dist.init_process_group(
            "nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, device_id=torch.device("cuda", rank)
        )
    else:
        from mok_megatron.stock_cpu import enable_stock_cpu

        enable_stock_cpu()


def use_groups(ep_size: int, pp_size: int = 1) -> None:
    """Megatron's process groups over all ranks, and its random numbers."""
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(1, pp_size, expert_model_parallel_size=ep_size)
    if torch.cuda.is_available():
        tensor_parallel.model_parallel_cuda_manual_seed(1234)


def base_config(device: str, dtype: torch.dtype, **changes: Any) -> dict[str, Any]:
    """TransformerConfig's arguments for a layer or a model of this device."""
    from mok_megatron.stock_cpu import CPU_CONFIG

    common: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "ffn_hidden_size": INNER,
        "moe_ffn_hidden_size": INNER,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": TOPK,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "moe_token_dispatcher_type": "alltoall",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "add_bias_linear": False,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
    }
    placed = CPU_CONFIG if device == "cpu" else {"gradient_accumulation_fusion": dtype == torch.bfloat16, "bias_dropout_fusion": False}
    return {**common, **placed, **changes}


@contextmanager
def chosen_backend(backend: str, max_tokens: int, **knobs: Any) -> Iterator[None]:
    """Layers built inside use ``backend``."""
    before = settings._chosen
    apply_mok_to_megatron(backend=backend, config=MoKConfig(timeout_seconds=30, **knobs), max_tokens_per_rank=max_tokens)
    try:
        yield
    finally:
        settings._chosen = before


@dataclasses.dataclass(frozen=True)
class Kind:
    """A layer to compare: ``grouped`` TEGroupedMLP, else SequentialMLP; ``te``: over Transformer Engine's linears."""

    backend: str
    grouped: bool = False
    te: bool = True
    dtype: torch.dtype = torch.bfloat16
    changes: tuple[tuple[str, Any], ...] = ()


def expert_matrices(layer: Any, attribute: str = "data") -> list[Tensor]:
    """E_local matrices [2I, H], then E_local matrices [H, I], of TEGroupedMLP or SequentialMLP."""
    experts, count = layer.experts, layer.num_local_experts
    if hasattr(experts, "local_experts"):
        kinds = [[getattr(e, name).weight for e in experts.local_experts] for name in ("linear_fc1", "linear_fc2")]
    else:
        kinds = [[getattr(linear, f"weight{i}") for i in range(count)] for linear in (experts.linear_fc1, experts.linear_fc2)]
    return [getattr(p, attribute) for kind in kinds for p in kind]


def weights_of(seed: int) -> list[Tensor]:
    """BF16 values, on the CPU: router [E, H], then E matrices [2I, H], then E matrices [H, I]."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(EXPERTS, HIDDEN), *[(2 * INNER, HIDDEN)] * EXPERTS, *[(HIDDEN, INNER)] * EXPERTS]
    return [(torch.randn(shape, generator=g) * shape[1] ** -0.5).bfloat16() for shape in shapes]


def tokens_of(seed: int, router: Tensor, count: int) -> Tensor:
    """[count, 1, H] BF16 normal tokens whose experts are chosen with a margin, so that rounding chooses no other."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * count, HIDDEN, generator=g).bfloat16()
    scores = torch.softmax(x.double() @ router.double().t(), dim=1).sort(dim=1, descending=True).values
    clear = x[(scores[:, TOPK - 1] - scores[:, TOPK]) > MARGIN]
    assert len(clear) >= count, "too few tokens with a clear choice of experts"
    return clear[:count].unsqueeze(1)


def build(kind: Kind, device: str, seed: int) -> Any:
    """The layer under Megatron's DDP with FP32 gradient buffers and overlapped reduction, weights from the seed."""
    config = TransformerConfig(**base_config(device, kind.dtype, **dict(kind.changes)))
    if not kind.te:
        config.gradient_accumulation_fusion = False
    with chosen_backend(kind.backend, TOKENS):
        layer = get_moe_module_spec(use_te=kind.te, num_experts=EXPERTS, moe_grouped_gemm=kind.grouped)(config=config)
    layer.set_layer_number(1)
    layer = layer.to(device=device, dtype=kind.dtype)
    router, *experts = weights_of(seed)
    first = layer.local_expert_indices[0]
    count = layer.num_local_experts
    with torch.no_grad():
        layer.router.weight.copy_(router)
        for index, matrix in enumerate(expert_matrices(layer)):
            matrix.copy_(experts[index // count * EXPERTS + first + index % count])
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True, bucket_size=100_000)
    return DistributedDataParallel(config, ddp, layer)


def train_step(model: Any, device: str, seed: int) -> dict[str, Tensor]:
    """One iteration of MICROBATCHES microbatches: y and dx of each, and the parameters' main_grad, FP32 copies."""
    layer = model.module
    dtype = layer.config.params_dtype
    router = weights_of(seed)[0]
    model.zero_grad_buffer()
    found: dict[str, Tensor] = {}
    for index in range(MICROBATCHES):
        number = seed + 1000 * (1 + index) + dist.get_rank()
        x = tokens_of(number, router, TOKENS).to(device=device, dtype=dtype).requires_grad_(True)
        dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(number + 500)).bfloat16().to(device=device, dtype=dtype)

        def step(x: Tensor = x, dy: Tensor = dy) -> Tensor:
            y, bias = model(x)
            assert bias is None
            y.backward(dy)
            return y.detach()

        if index == MICROBATCHES - 1:
            y = step()
        else:
            with model.no_sync():
                y = step()
        found[f"y {index}"], found[f"dx {index}"] = y.float(), x.grad.float()
    model.finish_grad_sync()
    found["router"] = layer.router.weight.main_grad.float().clone()
    for index, gradient in enumerate(expert_matrices(layer, "main_grad")):
        found[f"fc{1 + index // layer.num_local_experts} of expert {layer.local_expert_indices[index % layer.num_local_experts]}"] = (
            gradient.float().clone()
        )
    return found


def distance(actual: Tensor, exact: Tensor) -> float:
    """|actual - exact| / |exact|, Frobenius; 0 where both are 0."""
    off, scale = float((actual - exact).double().norm()), float(exact.double().norm())
    return off if scale == 0 else off / scale


def compare_with_stock(device: str, ep_size: int, seed: int) -> dict[str, float]:
    """MoK against AllToAll, each against an FP32 run, for TEGroupedMLP and SequentialMLP; the largest ratio of each layout.

    FP32 runs Megatron's own linears on AllToAll: no BF16 rounding, other than of the weights and tokens that all runs share. Stock rounds
    the dispatched activation, fc1's output, the activation and fc2's output to BF16, as MoK does, and rounds the K rows and their sum.
    Both are off by rounding alone, whose norm over a whole tensor is steady: 1.5 leaves room for another order, not for another error.
    """
    use_groups(ep_size)
    exact = train_step(build(Kind("alltoall", te=False, dtype=torch.float32), device, seed), device, seed)
    layouts = {"TEGroupedMLP": (True, True), "SequentialMLP": (False, True)} if device == "cuda" else {"SequentialMLP": (False, False)}
    worst: dict[str, float] = {}
    first: dict[str, Tensor] = {}
    for name, (grouped, te) in layouts.items():
        stock = train_step(build(Kind("alltoall", grouped, te), device, seed), device, seed)
        model = build(Kind("mok", grouped, te), device, seed)
        assert type(model.module).__name__ == "MoKMoELayer"
        ours, again = train_step(model, device, seed), train_step(model, device, seed)
        recompute = (("recompute_granularity", "selective"), ("recompute_modules", ["moe"]))
        recomputed = train_step(build(Kind("mok", grouped, te, changes=recompute), device, seed), device, seed)
        assert ours.keys() == stock.keys() == exact.keys()
        ratios = {}
        for key, wanted in exact.items():
            off, allowed = distance(ours[key], wanted), 1.5 * distance(stock[key], wanted)
            assert off <= allowed, f"EP {ep_size}, {name}, {key}: MoK is off by {off:.3e}, AllToAll by {allowed / 1.5:.3e}"
            ratios[key] = 1.5 * off / allowed if allowed else 0.0
            if not key.startswith("router"):  # Megatron's own product
                assert torch.equal(ours[key], again[key]), f"{name}, {key}: two runs differ"
                # y comes from the pass that keeps nothing, where Megatron's router itself gives other last bits.
                assert key[0] == "y" or torch.equal(ours[key], recomputed[key]), f"{name}, {key}: recomputation changes it"
                assert torch.equal(ours[key], first.setdefault(key, ours[key])), f"{name}, {key}: the layout changes it"
        worst[name] = max(ratios.values())
    return worst


def rendezvous_file(folder: Path) -> str:
    """A path that no process group has met at."""
    return str(folder / f"nccl-{len(list(folder.iterdir()))}")
