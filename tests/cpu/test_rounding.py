"""Where values are rounded and in which order they are added, told from the outside: exact, by splitting tokens into single routes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.cpu.problems import SMALLEST_RING, Batch, Result, Run, execute, random_batch

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def _single_routes(batch: Batch) -> Batch:
    """Token t with K routes becomes K tokens with one route each, in slot 0."""
    topk = batch.topk_experts.shape[1]
    alone = torch.full((batch.x.shape[0] * topk, topk), -1, dtype=torch.int32)
    alone[:, 0] = batch.topk_experts.flatten()
    weights = torch.zeros(alone.shape)
    weights[:, 0] = batch.router_weights.flatten()
    return dataclasses.replace(
        batch,
        x=batch.x.repeat_interleave(topk, 0),
        dy=batch.dy.repeat_interleave(topk, 0),
        topk_experts=alone,
        router_weights=weights,
    )


def _ordered_sum(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    total = torch.zeros(rows.shape[0], rows.shape[2])
    for slot in range(rows.shape[1]):
        total = total + rows[:, slot].float()
    return total.to(dtype)


def _rounded_sum(rows: torch.Tensor) -> torch.Tensor:
    total = rows[:, 0]
    for slot in range(1, rows.shape[1]):
        total = total + rows[:, slot]
    return total


@DTYPES
def test_combine_adds_rounded_rows_in_ascending_slot_order_and_rounds_once(seed: int, dtype: torch.dtype) -> None:
    tokens, topk = 60, 5
    batch = random_batch(seed, tokens, experts=8, topk=topk, dtype=dtype, hidden=128)
    together = execute(None, batch, Run((tokens,), SMALLEST_RING))
    alone = execute(None, _single_routes(batch), Run((tokens * topk,), SMALLEST_RING))
    for name in ("y", "dx"):
        rows = getattr(alone, name).view(tokens, topk, -1)
        assert torch.equal(getattr(together, name), _ordered_sum(rows, dtype)), name
        other = _ordered_sum(rows.flip(1), dtype) if dtype == torch.float32 else _rounded_sum(rows)
        assert not torch.equal(getattr(together, name), other), "the order, or the place of the rounding, must matter here"
    assert torch.equal(together.d_router_weights, alone.d_router_weights[:, 0].view(tokens, topk))


def _one_row(dtype: torch.dtype, weight: float, seed: int) -> tuple[Batch, Result]:
    """One token, one expert, so that every intermediate value can be read off a result."""
    batch = random_batch(seed, 1, experts=1, topk=1, dtype=dtype, routes=torch.zeros(1, 1))
    batch.router_weights.fill_(weight)
    return batch, execute(None, batch, Run((1,), main_grads=torch.float32, overwrite=True))


def test_h_is_rounded_once_after_the_router_weight(seed: int) -> None:
    """h read off dw2 = dy^T h with dy a unit vector: bf16(silu(gate) * up * p), gate and up rounded first."""
    batch = random_batch(seed, 1, experts=1, topk=1, dtype=torch.bfloat16, routes=torch.zeros(1, 1))
    batch.dy.zero_()
    batch.dy[0, 5] = 1.0
    batch.router_weights.fill_(0.3)
    result = execute(None, batch, Run((1,), main_grads=torch.float32))
    gate, up = (batch.x.float() @ batch.w13[0].float().T).bfloat16().float().chunk(2, 1)
    unweighted = torch.sigmoid(gate) * gate * up
    h = (unweighted * 0.3).bfloat16().float()
    twice = (unweighted.bfloat16().float() * 0.3).bfloat16().float()
    got = result.dw2[0, 5][None]
    # The last bit of a few elements may differ by fp32 evaluation order of gate; a second rounding changes far more of them.
    assert (got != h).float().mean() < 0.05
    assert (got != twice).float().mean() > 0.1
    assert bool((result.dw2[0, :5] == 0).all())


@DTYPES
def test_backward_recomputes_h_bit_for_bit(seed: int, dtype: torch.dtype) -> None:
    """h of the forward read off y with w2 the identity, h of the backward read off dw2 with dy a unit vector: 1024 values."""
    experts = 16
    routes = torch.arange(experts, dtype=torch.int32)[:, None]
    batch = random_batch(seed, experts, experts=experts, topk=1, dtype=dtype, routes=routes)
    batch.w2 = torch.eye(64, dtype=dtype).repeat(experts, 1, 1)
    batch.dy.zero_()
    batch.dy[:, 5] = 1.0
    result = execute(None, batch, Run((experts,), SMALLEST_RING, main_grads=torch.float32))
    assert torch.equal(result.dw2[:, 5], result.y.float()) and bool((result.y != 0).any())


def test_router_weight_gradient_is_exact_at_zero(seed: int) -> None:
    """No division by p: at p = 0 the gradient is <dy, expert(x)>, the same number as at p = 1 (it does not depend on p)."""
    for dtype in (torch.float32, torch.bfloat16):
        _, at_zero = _one_row(dtype, 0.0, seed)
        _, at_one = _one_row(dtype, 1.0, seed)
        assert bool((at_zero.y == 0).all()) and float(at_zero.d_router_weights) != 0
        assert torch.equal(at_zero.d_router_weights, at_one.d_router_weights)
        assert bool((at_zero.dx == 0).all()) and bool((at_zero.dw13 == 0).all()) and bool((at_zero.dw2 == 0).all())
