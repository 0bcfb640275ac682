"""The routes of a call in one launch each way, for GPUs; :mod:`mok_megatron.megatron.router` has the same in torch's operators.

T tokens, E experts, K routes a token. A dozen small operators on [T, E] tensors would cost more host time than a whole forward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 4096
"""Of a block of rows: enough work for a program, few enough registers."""


@triton.jit
def _compact(chosen_at, probs_at, ids_at, weights_at, tokens, experts, topk, ROWS: tl.constexpr, COLS: tl.constexpr, SLOTS: tl.constexpr):  # noqa: ANN001, ANN202
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, COLS)[None, :]
    inside = (rows < tokens) & (cols < experts)
    place = rows.to(tl.int64) * experts + cols
    chosen = (tl.load(chosen_at + place, mask=inside, other=0) != 0).to(tl.int32)
    probs = tl.load(probs_at + place, mask=inside, other=0).to(tl.float32)
    position = tl.cumsum(chosen, axis=1) - 1
    count = tl.sum(chosen, axis=1)[:, None]
    kept = (chosen != 0) & (position < topk)
    expert = tl.where((position == 0) & (count > topk), experts, cols)
    slot = rows.to(tl.int64) * topk + position
    tl.store(ids_at + slot, expert, mask=kept)
    tl.store(weights_at + slot, probs, mask=kept)
    slots = tl.arange(0, SLOTS)[None, :]
    empty = (slots >= count) & (slots < topk) & (rows < tokens)
    slot = rows.to(tl.int64) * topk + slots
    tl.store(ids_at + slot, tl.full([ROWS, SLOTS], -1, tl.int32), mask=empty)
    tl.store(weights_at + slot, tl.zeros([ROWS, SLOTS], tl.float32), mask=empty)


@triton.jit
def _spread(grad_at, ids_at, dense_at, tokens, experts, TOPK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # noqa: ANN001, ANN202
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, COLS)[None, :]
    dense = tl.zeros([ROWS, COLS], tl.float32)
    for k in tl.static_range(TOPK):
        slot = rows.to(tl.int64) * TOPK + k
        expert = tl.load(ids_at + slot, mask=rows < tokens, other=-1)
        grad = tl.load(grad_at + slot, mask=rows < tokens, other=0)
        dense = tl.where(cols == expert, grad, dense)
    place = rows.to(tl.int64) * experts + cols
    tl.store(dense_at + place, dense, mask=(rows < tokens) & (cols < experts))


def _blocks(tokens: int, experts: int) -> tuple[int, int, int]:
    """(programs, rows of one, columns of one)."""
    cols = triton.next_power_of_2(experts)
    rows = max(1, _ELEMENTS // cols)
    return -(-tokens // rows), rows, cols


class _Routes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probs: Tensor, routing_map: Tensor, topk: int) -> tuple[Tensor, Tensor]:
        tokens, experts = routing_map.shape
        ids = torch.empty(tokens, topk, dtype=torch.int32, device=probs.device)
        weights = torch.empty(tokens, topk, dtype=torch.float32, device=probs.device)
        if tokens:
            programs, rows, cols = _blocks(tokens, experts)
            slots = triton.next_power_of_2(topk)
            _compact[(programs,)](routing_map.view(torch.uint8), probs, ids, weights, tokens, experts, topk, ROWS=rows, COLS=cols, SLOTS=slots)
        ctx.mark_non_differentiable(ids)
        ctx.save_for_backward(ids)
        ctx.like = (probs.shape, probs.dtype)
        return ids, weights

    @staticmethod
    def backward(ctx: Any, _: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        (tokens, experts), dtype = ctx.like
        dense = torch.empty(tokens, experts, dtype=torch.float32, device=grad.device)
        if tokens:
            programs, rows, cols = _blocks(tokens, experts)
            _spread[(programs,)](grad.contiguous(), ids, dense, tokens, experts, TOPK=ids.shape[1], ROWS=rows, COLS=cols)
        return dense.to(dtype), None, None


def routes_and_weights(probs: Tensor, routing_map: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """What :func:`mok_megatron.megatron.router.routes_and_weights` gives.

    Args:
        probs: [T, E], any floating dtype. routing_map: [T, E] bool. topk: K.
    """
    return _Routes.apply(probs.contiguous(), routing_map.contiguous(), topk)
