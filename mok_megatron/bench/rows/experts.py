"""The pieces of every baseline: grouped GEMMs of torch around a fused SwiGLU times the router weight, and moves of rows.

Each piece that torch has no good gradient for brings its own: a gather's gradient is a sum over slots, not a scatter with atomics.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F


def swiglu(gate_up: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """gate_up [R, 2I], p fp32 [R] -> [R, I]: silu(gate) * up * p in fp32, rounded once."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float() * p[:, None]).to(gate_up.dtype)


def swiglu_grads(gate_up: torch.Tensor, p: torch.Tensor, dh: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `swiglu` for dh [R, I]: d_gate_up [R, 2I], rounded once, and d_p fp32 [R]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    sigma, dh = torch.sigmoid(gate), dh.float()
    act = gate * sigma
    weighted = dh * p[:, None]
    d_gate = weighted * up * sigma * (1 + gate * (1 - sigma))
    return torch.cat([d_gate, weighted * act], dim=-1).to(gate_up.dtype), (dh * act * up).sum(-1)


def sum_rows(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """rows [N, H], places int64 [T, K], -1 = none -> [T, H]: the sum over K of rows[places] in fp32, rounded once."""
    total = torch.zeros(places.shape[0], rows.shape[1], dtype=torch.float32, device=rows.device)
    for slot in range(places.shape[1]):
        place = places[:, slot]
        row = rows[place.clamp(min=0)].float()
        total = total + torch.where(place[:, None] >= 0, row, 0.0)
    return total.to(rows.dtype)


@functools.cache
def fused(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """The function as one kernel on a GPU; as it is on the CPU, where nothing is gained that a test should wait for."""
    if device_type == "cpu":
        return function
    import torch._inductor.config

    # A kernel or two: worker processes of the compiler would cost more than they save, and would disturb the timing.
    torch._inductor.config.compile_threads = 1
    return torch.compile(function, dynamic=True)  # give it detached tensors: it compiles once more for those that take gradients


class Swiglu(torch.autograd.Function):
    """`swiglu` and `swiglu_grads`."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up, p)
        return fused(swiglu, gate_up.device.type)(gate_up.detach(), p.detach())

    @staticmethod
    def backward(ctx: Any, dh: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate_up, p = ctx.saved_tensors
        return fused(swiglu_grads, dh.device.type)(gate_up, p, dh)


class SpreadRows(torch.autograd.Function):
    """x [T, H], tokens int64 [N], places int64 [T, K] (where a token's rows lie, -1 = none) -> x[tokens] [N, H]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        return x[tokens]

    @staticmethod
    def backward(ctx: Any, rows: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return fused(sum_rows, rows.device.type)(rows, *ctx.saved_tensors), None, None


class GatherSums(torch.autograd.Function):
    """rows [N, H], and tokens and places as of `SpreadRows` -> [T, H]: `sum_rows`."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        return fused(sum_rows, rows.device.type)(rows.detach(), places)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return dy[ctx.saved_tensors[0]], None, None


class Take(torch.autograd.Function):
    """values [N, ...], order int64 [M], no index twice -> values[order]."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.count = values.shape[0]
        return values[order]

    @staticmethod
    def backward(ctx: Any, taken: torch.Tensor) -> tuple[torch.Tensor, None]:
        (order,) = ctx.saved_tensors
        # What nobody took has no gradient; where all are taken, nothing needs to be cleared first.
        make = taken.new_empty if order.numel() == ctx.count else taken.new_zeros
        return make(ctx.count, *taken.shape[1:]).index_copy_(0, order, taken), None


class Place(torch.autograd.Function):
    """rows [N, H], order int64 [N], a permutation -> [N, H] with result[order] = rows."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order)
        return torch.empty_like(rows).index_copy_(0, order, rows)

    @staticmethod
    def backward(ctx: Any, placed: torch.Tensor) -> tuple[torch.Tensor, None]:
        return placed[ctx.saved_tensors[0]], None


def grouped_experts(rows: torch.Tensor, p: torch.Tensor, ends: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """rows [R, H] ordered by expert, p fp32 [R], ends int32 [E_local] (where each expert's rows end) -> [R, H]."""
    if rows.shape[0] == 0:
        # Nothing to multiply; the weights' gradients are zeros, and every rank must walk the same graph.
        return rows + 0 * (p.sum() + w13.view(-1)[:1].sum() + w2.view(-1)[:1].sum()).to(rows.dtype) if rows.requires_grad else rows
    gate_up = F.grouped_mm(rows, w13.transpose(1, 2), offs=ends)
    hidden = Swiglu.apply(gate_up, p)
    return F.grouped_mm(hidden, w2.transpose(1, 2), offs=ends)
