"""Stock and MoK layers of one Megatron, for tests on the CPU. Importing this imports Megatron (seconds)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

from mok_megatron import MoKConfig
from mok_megatron.megatron import apply_mok_to_megatron, settings
from mok_megatron.stock_cpu import CPU_CONFIG, enable_stock_cpu

MEGATRON = tuple(int(part) for part in megatron.core.__version__.split(".")[:2])

SMALL: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "ffn_hidden_size": 128,
    "moe_ffn_hidden_size": 128,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.0,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "moe_token_dispatcher_type": "alltoall",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    **CPU_CONFIG,
}


def start_megatron(ep_size: int) -> None:
    """Model-parallel groups over the ranks of the present call (all of them expert-parallel), and Megatron on the CPU.

    Without torch.distributed (a test in pytest's own process) a group of one rank is made first.
    """
    enable_stock_cpu()
    _forget_losses()
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if parallel_state.is_initialized():
        if parallel_state.get_expert_model_parallel_world_size() == ep_size:
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(1, 1, expert_model_parallel_size=ep_size)


def _forget_losses() -> None:
    """Megatron keeps, for a process's life, the number of layers of the first model whose auxiliary losses it saw, and the scale's shape."""
    moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
    try:
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker as forget
    except ImportError:
        forget = moe_utils.get_moe_layer_wise_logging_tracker().clear
    forget()


def make_config(ep_size: int = 1, dtype: torch.dtype = torch.float32, **changes: Any) -> TransformerConfig:
    """SMALL with changes."""
    values = {
        **SMALL,
        "expert_model_parallel_size": ep_size,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        **changes,
    }
    return TransformerConfig(**values)


@contextmanager
def chosen_backend(backend: str | None, **options: Any) -> Iterator[None]:
    """Layers built inside use ``backend`` (None: what flags and environment say); ``knobs`` is its MoKConfig."""
    before = settings._chosen
    apply_mok_to_megatron(backend=backend, config=options.pop("knobs", None), **options)
    try:
        yield
    finally:
        settings._chosen = before


def build_layer(backend: str | None, config: TransformerConfig, seed: int = 1, layer_number: int = 1, **options: Any) -> Any:
    """An MoE layer with SequentialMLP experts; each global expert has weights of its own, the same at every EP size."""
    if backend == "mok":
        options.setdefault("knobs", MoKConfig(timeout_seconds=30))
        options.setdefault("max_tokens_per_rank", 64 if config.expert_model_parallel_size > 1 else None)
    spec = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    with chosen_backend(backend, **options):
        layer = spec(config=config) if callable(spec) else build_module(spec, config=config)
    layer.set_layer_number(layer_number)
    initialise(layer, seed)
    return layer.to(config.params_dtype)


def make_mok(**changes: Any) -> Any:
    """A MoK layer on one rank, SMALL with changes."""
    start_megatron(1)
    return build_layer("mok", make_config(**changes))


def initialise(layer: Any, seed: int) -> None:
    """Weights drawn from the seed and the parameter's place, experts by their global number."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            place = name
            if ".local_experts." in name:
                local = int(name.split(".local_experts.")[1].split(".")[0])
                place = name.replace(f".{local}.", f".{layer.local_expert_indices[local]}.")
            generator = torch.Generator().manual_seed(seed * 1_000_003 + sum(map(ord, place)) * 7919)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def tokens(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal tokens from a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run_layer(layer: Any, x: torch.Tensor, dy: torch.Tensor, **forward: Any) -> dict[str, torch.Tensor]:
    """One forward and backward; y, dx and every parameter's gradient (by global expert number). Clears gradients first."""
    layer.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_(True)
    y, bias = layer(x, **forward)
    assert bias is None
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, **named_gradients(layer)}


def named_gradients(layer: Any, attribute: str = "grad") -> dict[str, torch.Tensor]:
    """Gradients by parameter name, experts by their global number."""
    found = {}
    for name, parameter in layer.named_parameters():
        if ".local_experts." in name:
            local = int(name.split(".local_experts.")[1].split(".")[0])
            name = name.replace(f".local_experts.{local}.", f".local_experts.{layer.local_expert_indices[local]}.")
        gradient = getattr(parameter, attribute)
        assert gradient is not None, f"{name} has no {attribute}"
        found[name] = gradient.clone()
    return found


def assert_same_numbers(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float, skip: tuple[str, ...] = ()
) -> None:
    """Element by element within ``tolerance`` of the largest magnitude of the expected tensor."""
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        if name in skip:
            continue
        scale = wanted.double().abs().max().item()
        worst = (actual[name].double() - wanted.double()).abs().max().item() if wanted.numel() else 0.0
        assert worst <= tolerance * scale, f"{name}: off by {worst} at scale {scale}"


FP32_TOLERANCE = 2e-6
"""Sums of at most 256 fp32 products in another order: 2^-24 * sqrt(256) is 1e-6 of the sum of magnitudes, one layer after another."""
