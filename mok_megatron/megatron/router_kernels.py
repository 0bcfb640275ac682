"""The routes of a call in one launch each way, for GPUs; :mod:`mok_megatron.megatron.router` has the same in torch's operators.

T tokens, E experts, K routes a token. A dozen small operators on [T, E] tensors would cost more host time than a whole forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mok_megatron.config import MAX_TOPK
from mok_megatron.errors import MoKArgumentError, MoKError
from mok_megatron.executors.cuda import kernel_library, launch

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
"""Their numbers in csrc/kernels/launch.h."""


def _launch(function: Callable[..., int], device: torch.device, *words: int) -> None:
    code = launch(function, device, *words)
    if code != 0:
        raise MoKError(f"{function.__name__} failed with CUDA error {code}")


class _Routes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probs: Tensor, routing_map: Tensor, topk: int) -> tuple[Tensor, Tensor]:
        tokens, experts = probs.shape
        ids = torch.empty(tokens, topk, dtype=torch.int32, device=probs.device)
        weights = torch.empty(tokens, topk, dtype=torch.float32, device=probs.device)
        dtype = _DTYPES[probs.dtype]
        if tokens:
            compact = kernel_library().mok_sm90_compact_routes
            addresses = routing_map.data_ptr(), probs.data_ptr(), dtype, ids.data_ptr(), weights.data_ptr()
            _launch(compact, probs.device, *addresses, tokens, experts, topk)
        ctx.mark_non_differentiable(ids)
        ctx.set_materialize_grads(False)  # autograd would write zeros for the ids, a launch more each backward
        ctx.save_for_backward(ids)
        ctx.like = (experts, probs.dtype)
        return ids, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        if grad is None:
            return None, None, None
        (ids,) = ctx.saved_tensors
        experts, dtype = ctx.like
        grad = grad.contiguous()
        tokens, topk = ids.shape
        dense = torch.empty(tokens, experts, dtype=dtype, device=grad.device)
        if tokens:
            spread = kernel_library().mok_sm90_spread_gradients
            _launch(spread, grad.device, grad.data_ptr(), ids.data_ptr(), dense.data_ptr(), _DTYPES[dtype], tokens, experts, topk)
        return dense, None, None


def routes_and_weights(probs: Tensor, routing_map: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """What :func:`mok_megatron.megatron.router.routes_and_weights` gives.

    Args:
        probs: [T, E] fp32, bf16, fp16 or fp64. routing_map: [T, E] bool. topk: K, at most 32.

    Raises:
        MoKArgumentError: other shapes, dtypes or devices.
    """
    if probs.dim() != 2 or probs.shape != routing_map.shape:
        raise MoKArgumentError(f"probs: shape {list(probs.shape)} must be [T, E], that of routing_map, {list(routing_map.shape)}")
    if probs.dtype not in _DTYPES:
        raise MoKArgumentError(f"probs: dtype {probs.dtype} must be one of {', '.join(map(str, _DTYPES))}")
    if routing_map.dtype is not torch.bool or routing_map.device != probs.device:
        raise MoKArgumentError(
            f"routing_map: dtype {routing_map.dtype} on {routing_map.device} must be torch.bool on {probs.device}, where probs are"
        )
    if not 1 <= topk <= MAX_TOPK:
        raise MoKArgumentError(f"moe_router_topk={topk}: must be between 1 and {MAX_TOPK}")
    return _Routes.apply(probs.contiguous(), routing_map.contiguous(), topk)
