"""The experts of every baseline: two grouped GEMMs of torch around a fused SwiGLU times the router weight."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F


def swiglu(gate_up: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """gate_up [R, 2I], p fp32 [R] -> [R, I]: silu(gate) * up * p in fp32, rounded once."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float() * p[:, None]).to(gate_up.dtype)


def sum_rows(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """rows [N, H], places int64 [T, K], -1 = none -> [T, H]: the sum over K of rows[places] in fp32, rounded once."""
    total = torch.zeros(places.shape[0], rows.shape[1], dtype=torch.float32, device=rows.device)
    for slot in range(places.shape[1]):
        place = places[:, slot]
        row = rows[place.clamp(min=0)].float()
        total = total + torch.where(place[:, None] >= 0, row, 0.0)
    return total.to(rows.dtype)


@functools.cache
def fused(function: Callable[..., torch.Tensor], device_type: str) -> Callable[..., torch.Tensor]:
    """The function as one kernel on a GPU; as it is on the CPU, where nothing is gained that a test should wait for."""
    if device_type == "cpu":
        return function
    import torch._inductor.config

    # A kernel or two: worker processes of the compiler would cost more than they save, and would disturb the timing.
    torch._inductor.config.compile_threads = 1
    return torch.compile(function, dynamic=True)


def grouped_experts(rows: torch.Tensor, p: torch.Tensor, ends: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """rows [R, H] ordered by expert, p fp32 [R], ends int32 [E_local] (where each expert's rows end) -> [R, H]."""
    if rows.shape[0] == 0:
        return rows
    gate_up = F.grouped_mm(rows, w13.transpose(1, 2), offs=ends)
    hidden = fused(swiglu, rows.device.type)(gate_up, p)
    return F.grouped_mm(hidden, w2.transpose(1, 2), offs=ends)
