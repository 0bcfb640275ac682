"""FP64 reference of the layer on a sample of tokens, and the rule by which an output is right.

An output row y[t] must satisfy, in the Euclidean norm over its H elements,

    |y[t] - ref[t]| <= tolerance * sqrt(sum over slots k of |ref_row[t, k]|^2),    tolerance = u * sqrt(n) + 2^-24 * (H + I)

with u = 2^-8 for bf16 and n the number of roundings between inputs and output: gate, up, h, the row of a route, the sum of a rank's rows (some
systems round there) and the sum of all. Each is at most u relative to what it rounds, they are independent, and a vector of H of them
adds in quadrature, hence sqrt(n); the rows of a token come from independent experts, hence the quadrature over k. A typical rounding is
0.4 u, so that a right output sits at about 0.4 of the tolerance, while a lost route or a router weight that is off by a few per cent
lies far outside. The second term bounds fp32 sums of H and of I products.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.distributed as dist

from mok_megatron.bench.problem import LayerProblem

ROUNDINGS = 6
SAMPLE_TOKENS = 48


@dataclasses.dataclass(frozen=True)
class Reference:
    """tokens: sampled token numbers of this rank [S]. value: FP64 [S, H]. scale: FP64 [S], root of the sum over slots of |ref_row|^2."""

    tokens: torch.Tensor
    value: torch.Tensor
    scale: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Verdict:
    """error: the largest |y - ref| / scale of the sample (inf for NaN). fault: None when the output is right, else what is wrong with it."""

    error: float
    tolerance: float
    fault: str | None = None


def distance(verdict: Verdict) -> tuple[bool, float]:
    """Orders verdicts: a fault lies beyond everything, else the error in units of what is allowed."""
    return verdict.fault is not None, verdict.error / verdict.tolerance if verdict.tolerance else verdict.error


def tolerance(problem: LayerProblem, roundings: int = ROUNDINGS) -> float:
    unit = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}[problem.x.dtype]
    return unit * math.sqrt(roundings) + 2.0**-24 * (problem.shape.hidden_size + problem.shape.intermediate_size)


def sample_tokens(problem: LayerProblem, seed: int = 0) -> torch.Tensor:
    """Up to SAMPLE_TOKENS token numbers of this rank: its first, its last, others at random. int64 on the CPU."""
    count = problem.x.shape[0]
    if count <= SAMPLE_TOKENS:
        return torch.arange(count)
    generator = torch.Generator().manual_seed(seed)
    return torch.cat([torch.tensor([0, count - 1]), 1 + torch.randperm(count - 2, generator=generator)[: SAMPLE_TOKENS - 2]])


def rows_of_expert(x: torch.Tensor, p: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """x [n, H], p [n], w13 [2I, H], w2 [H, I] -> FP64 [n, H]: the rows that one expert returns."""
    gate, up = (x.double() @ w13.double().T).chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up * p.double()[:, None]) @ w2.double().T


def make_reference(problem: LayerProblem, seed: int = 0) -> Reference:
    """The reference of this rank's sample. Collective: each rank computes its experts' part of every rank's sample."""
    tokens = sample_tokens(problem, seed)
    own = tokens.to(problem.x.device)
    samples = problem.ranks.gather(tuple(t[own].cpu() for t in (problem.x, problem.router_weights, problem.topk_experts)))
    x, p, routes = (torch.cat(parts).to(problem.x.device) for parts in zip(*samples, strict=True))
    value = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    square = torch.zeros(x.shape[0], dtype=torch.float64, device=x.device)
    first = problem.ranks.rank * problem.shape.experts_per_gpu
    for local in range(problem.shape.experts_per_gpu):
        token, slot = torch.nonzero(routes == first + local, as_tuple=True)
        if token.numel():
            rows = rows_of_expert(x[token], p[token, slot], problem.w13[local], problem.w2[local])
            value[token] += rows  # an expert once a token: no index repeats
            square[token] += rows.square().sum(1)
    parts = [value.cpu(), square.cpu()]
    if problem.ranks.host_group is not None:
        for part in parts:
            dist.all_reduce(part, group=problem.ranks.host_group)
    start = sum(len(sample[0]) for sample in samples[: problem.ranks.rank])
    mine = slice(start, start + len(tokens))
    return Reference(tokens, parts[0][mine].to(x.device), parts[1][mine].sqrt().to(x.device))


def judge(problem: LayerProblem, reference: Reference, y: torch.Tensor, roundings: int = ROUNDINGS) -> Verdict:
    """Verdict on this rank's output y: shape, dtype, every element finite, and the sample within the tolerance."""
    allowed = tolerance(problem, roundings)
    if y.shape != problem.x.shape or y.dtype != problem.x.dtype:
        wanted = f"{list(problem.x.shape)} {problem.x.dtype}"
        return Verdict(math.inf, allowed, f"the output is {list(y.shape)} {y.dtype}, must be {wanted}")
    return compare(reference.value, reference.scale, y, reference.tokens.to(y.device), allowed)


def compare(value: torch.Tensor, scale: torch.Tensor, y: torch.Tensor, rows: torch.Tensor, allowed: float) -> Verdict:
    """Verdict on rows ``rows`` of y against ``value`` [S, *] with ``scale`` [S]; all of y must be finite."""
    if not bool(torch.isfinite(y).all()):
        return Verdict(math.inf, allowed, f"{int((~torch.isfinite(y)).sum())} of {y.numel()} elements are not finite")
    error = (y[rows].double() - value).norm(dim=1)
    ratio = torch.where(error == 0, 0.0, error / scale)  # a token without routes has scale 0 and must be exactly 0
    worst = float(ratio.max()) if ratio.numel() else 0.0
    if worst <= allowed:
        return Verdict(worst, allowed)
    outside = int((ratio > allowed).sum())
    token = int(rows[ratio.argmax()])
    return Verdict(worst, allowed, f"{outside} of {len(rows)} sampled rows outside, row {token} worst: {worst:.3g} > {allowed:.3g}")
