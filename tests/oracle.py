"""Unfused FP64 oracle of the routed experts, with an error bound for every element.

The whole global batch and all experts at once, in plain FP64 torch, one expert after the other. It shares no code with the
executors: no schedule, no tiles, no ranks.

Formula (all of it in FP64, from the inputs as they are)::

    gate, up = x @ w13[e].T            h = silu(gate) * up * p           y[t] = sum over slots of  h @ w2[e].T
    a  = dy @ w2[e]                    d_p = sum_i a * silu(gate) * up
    d_gate = a * p * up * silu'(gate)  d_up = a * p * silu(gate)         dx[t] = sum over slots of  [d_gate, d_up] @ w13[e]
    dw2[e] = sum over rows of dy^T h   dw13[e] = sum over rows of [d_gate, d_up]^T x

Bounds
------
A quantity is a pair (v, e): its FP64 value and a bound on how far the executor's value may lie from it. The bound of an output
is a sum of  (unit) x (sum of |terms|)  over the roundings on the way, each carried to the output through products of absolute
values, where

* each rounding to the working dtype adds ``u * (|v| + e)``: u = 2^-8 for bf16 (half a unit in the last place of 8 significant
  bits, relative to the value), 2^-24 for fp32. These roundings are, and there are no others:
  forward: gate and up (1), h (2), the row of a route as it crosses the wire (3), the sum over a token's slots (4);
  backward: gate, up and h as in forward, d_gate and d_up (5), the row of dx (6), the sum of dx rows (7), dw where it is returned
  or accumulated in that dtype (8). d_router_weights has none of its own beyond gate and up: it stays in fp32;
* each fp32 sum of n products adds ``C * 2^-24 * sqrt(n) * sum of |terms|`` with C = 1: a random walk of n rounding errors, each at
  most half a unit of a partial sum and no partial sum above sum of |terms|, has a standard deviation below a third of that;
* fp32 evaluation of silu and silu' adds a few units of 2^-24 (``_ELEMENTARY``), silu' relative to its uncancelled terms, since it
  is a difference that can vanish.

So c = 1 in both parts, where 4 would be allowed. The dtype part is a worst case: nothing rounds more often than listed, so
nothing can exceed it. Second-order terms are kept: products carry ``e_a * e_b``, and silu carries its curvature, since gate may
be off by 2^-8.
``tests/cpu/test_oracle.py`` shows both halves: an independent executor with the right roundings stays inside, and planted
mistakes get out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_C = 1.0
_U32 = 2.0**-24
_ELEMENTARY = 4.0 * _U32
_UNIT = {torch.bfloat16: 2.0**-8, torch.float32: _U32}
_MAX_CURVATURE = 0.5  # largest |silu''|, at 0
_MAX_JERK = 0.31  # largest |silu'''|


@dataclass
class Bounded:
    """An FP64 value and, per element, how far a correct executor's value may lie from it."""

    value: torch.Tensor
    bound: torch.Tensor

    def __getitem__(self, index: object) -> Bounded:
        return Bounded(self.value[index], self.bound[index])

    def rounded(self, unit: float) -> Bounded:
        """After one rounding with relative error ``unit``."""
        return Bounded(self.value, self.bound + unit * (self.value.abs() + self.bound))

    def __mul__(self, other: Bounded) -> Bounded:
        a, b = self, other
        bound = a.value.abs() * b.bound + a.bound * b.value.abs() + a.bound * b.bound
        return Bounded(a.value * b.value, bound)

    def summed(self, dim: int) -> Bounded:
        """fp32 sum over ``dim``."""
        magnitude = self.value.abs().sum(dim)
        bound = self.bound.sum(dim) + _C * _U32 * math.sqrt(max(self.value.shape[dim], 1)) * magnitude
        return Bounded(self.value.sum(dim), bound)


def exact(tensor: torch.Tensor) -> Bounded:
    """An input: in FP64, with no error."""
    value = tensor.detach().to(torch.float64)
    return Bounded(value, torch.zeros_like(value))


def matmul(a: Bounded, b: Bounded) -> Bounded:
    """``a @ b`` accumulated in fp32; the products are exact in fp32 for bf16 operands, and for fp32 within what the sum has."""
    abs_a, abs_b = a.value.abs(), b.value.abs()
    n = a.value.shape[-1]
    bound = a.bound @ abs_b + abs_a @ b.bound + a.bound @ b.bound
    bound = bound + _C * _U32 * math.sqrt(max(n, 1)) * (abs_a @ abs_b)
    return Bounded(a.value @ b.value, bound)


def _silu(x: Bounded) -> Bounded:
    sigma = torch.sigmoid(x.value)
    slope = sigma * (1 + x.value * (1 - sigma))
    bound = slope.abs() * x.bound + 0.5 * _MAX_CURVATURE * x.bound.square() + _ELEMENTARY * (x.value * sigma).abs()
    return Bounded(x.value * sigma, bound)


def _silu_slope(x: Bounded) -> Bounded:
    sigma = torch.sigmoid(x.value)
    slope = sigma * (1 + x.value * (1 - sigma))
    curvature = sigma * (1 - sigma) * (2 + x.value * (1 - 2 * sigma))
    bound = curvature.abs() * x.bound + 0.5 * _MAX_JERK * x.bound.square()
    return Bounded(slope, bound + _ELEMENTARY * sigma * (1 + x.value.abs()))


@dataclass
class OracleResult:
    """Results for the global batch: y, dx [T, H], d_router_weights [T, K], dw13 [E, 2I, H], dw2 [E, H, I], counts [E]."""

    y: Bounded
    dx: Bounded | None
    d_router_weights: Bounded | None
    dw13: Bounded | None
    dw2: Bounded | None
    counts: torch.Tensor


def moe_oracle(
    x: torch.Tensor,
    router_weights: torch.Tensor,
    topk_experts: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    dy: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
    grad_dtype: torch.dtype | None = None,
) -> OracleResult:
    """Evaluate the routed experts in FP64.

    Args:
        x: [T, H] inputs of all ranks, one after the other.
        router_weights: [T, K].
        topk_experts: [T, K] global expert ids, -1 = no route.
        w13: [E, 2I, H] of all experts, gate rows first.
        w2: [E, H, I].
        dy: [T, H] gradient of y; None evaluates the forward only.
        dtype: working dtype of the executor (bf16 or fp32): what its roundings round to.
        grad_dtype: dtype in which weight gradients come out; ``dtype`` by default.
    """
    unit = _UNIT[dtype]
    grad_unit = _UNIT[grad_dtype or dtype]
    tokens, topk = topk_experts.shape
    experts, intermediate = w13.shape[0], w13.shape[1] // 2
    hidden = x.shape[1]
    rows, dx_rows = _zeros(tokens, topk, hidden), _zeros(tokens, topk, hidden)
    d_p, dw13, dw2 = _zeros(tokens, topk), _zeros(*w13.shape), _zeros(*w2.shape)
    all_x, all_p = exact(x), exact(router_weights)
    all_dy = exact(dy) if dy is not None else None
    counts = torch.zeros(experts, dtype=torch.int64)
    for expert in range(experts):
        token, slot = torch.nonzero(topk_experts == expert, as_tuple=True)
        counts[expert] = token.numel()
        if token.numel() == 0:
            continue
        e13, e2 = exact(w13[expert]), exact(w2[expert])
        x_rows, p = all_x[token], all_p[token, slot][:, None]
        gate_up = matmul(x_rows, Bounded(e13.value.T, e13.bound.T)).rounded(unit)
        gate, up = gate_up[:, :intermediate], gate_up[:, intermediate:]
        act = _silu(gate)
        h = (act * up * p).rounded(2 * _U32).rounded(unit)  # two fp32 products, then the rounding to the working dtype
        _put(rows, (token, slot), matmul(h, Bounded(e2.value.T, e2.bound.T)).rounded(unit))
        if all_dy is None:
            continue
        dy_rows = all_dy[token]
        a = matmul(dy_rows, e2)
        _put(d_p, (token, slot), (a * act * up).rounded(2 * _U32).summed(1))
        d_gate = (a * p * up * _silu_slope(gate)).rounded(4 * _U32).rounded(unit)
        d_up = (a * p * act).rounded(2 * _U32).rounded(unit)
        d13 = Bounded(torch.cat([d_gate.value, d_up.value], 1), torch.cat([d_gate.bound, d_up.bound], 1))
        _put(dx_rows, (token, slot), matmul(d13, e13).rounded(unit))
        _put(dw2, expert, matmul(Bounded(dy_rows.value.T, dy_rows.bound.T), h).rounded(grad_unit))
        _put(dw13, expert, matmul(Bounded(d13.value.T, d13.bound.T), x_rows).rounded(grad_unit))
    y = rows.summed(1).rounded(unit)
    if dy is None:
        return OracleResult(y, None, None, None, None, counts)
    return OracleResult(y, dx_rows.summed(1).rounded(unit), d_p, dw13, dw2, counts)


def _zeros(*shape: int) -> Bounded:
    return exact(torch.zeros(*shape, dtype=torch.float64))


def _put(into: Bounded, index: object, part: Bounded) -> None:
    into.value[index] = part.value
    into.bound[index] = part.bound


def worst_ratio(got: torch.Tensor, want: Bounded) -> float:
    """Largest error / bound over the elements; inf for a NaN, an Inf, or an error where the bound is 0. Shapes must agree."""
    if tuple(got.shape) != tuple(want.value.shape):
        raise AssertionError(f"shape {tuple(got.shape)}, expected {tuple(want.value.shape)}")
    if got.numel() == 0:
        return 0.0
    error = (got.detach().to(torch.float64) - want.value).abs()
    ratio = torch.where(error == 0, torch.zeros_like(error), error / want.bound)
    return float(torch.where(ratio.isnan(), torch.full_like(ratio, math.inf), ratio).max())


def assert_within(name: str, got: torch.Tensor, want: Bounded) -> None:
    """Fail, naming the worst element, if an element of ``got`` lies outside its bound."""
    ratio = worst_ratio(got, want)
    if ratio <= 1.0:
        return
    error = (got.detach().to(torch.float64) - want.value).abs()
    score = torch.where(error == 0, torch.zeros_like(error), error / want.bound).nan_to_num(nan=math.inf)
    index = tuple(int(i) for i in torch.unravel_index(score.flatten().argmax(), score.shape))
    outside = int((score > 1).sum())
    raise AssertionError(
        f"{name}: {outside} of {score.numel()} elements outside the bound, worst at {index}: got {float(got[index])!r}, "
        f"expected {float(want.value[index])!r} within {float(want.bound[index])!r} (error / bound = {ratio:.3g})"
    )
