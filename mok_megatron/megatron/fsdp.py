"""What sharded data parallelism asks of the experts.

Megatron-FSDP hands out ``main_grad`` through ``get_main_grad()``, from a communication bucket that may be another one each time, asks
for overwriting instead of accumulation (``overwrite_main_grad``, read in :mod:`mok_megatron.megatron.gradients`), and re-points a
parameter's storage at each gather: nothing here may be kept between calls. PyTorch's FSDP2 leaves DTensors outside of the wrapped
module's forward; those are refused.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mok_megatron.errors import MoKUnsupportedError


def main_grad_of(parameter: Any) -> Tensor | None:
    """The tensor that collects the parameter's gradient, None where it has none (ordinary ``.grad``)."""
    if hasattr(parameter, "__fsdp_param__"):
        parameter.main_grad = parameter.get_main_grad()
    return getattr(parameter, "main_grad", None)


def require_plain_tensor(name: str, parameter: Tensor) -> None:
    """Refuses weights that are not one local tensor.

    Raises:
        MoKUnsupportedError: ``parameter`` is a DTensor or a quantised tensor.
    """
    kind = type(parameter).__name__
    if hasattr(parameter, "to_local"):
        raise MoKUnsupportedError(
            f"{name} is a {kind}: --use-torch-fsdp2 keeps expert weights sharded while the fused kernel reads them. "
            "Use --use-megatron-fsdp or Megatron's distributed optimizer"
        )
    if hasattr(parameter, "_rowwise_data"):
        raise MoKUnsupportedError(f"{name} is a {kind}: quantised parameters (--fp8-param-gather) are not supported by --moe-backend=mok yet")
