"""FP64 reference of the gradients on a sample, and the rule by which they are right.

Sampled are the input gradients of the tokens of `oracle`, the router weights' gradients of those tokens, and of this rank's busiest and
idlest expert some columns of dw13 and some rows of dw2: all that belongs to one hidden channel each.

An error is measured in units of what the roundings move. With a = dy w2, sigma = sigmoid(gate), s = silu(gate), p the router weight,

    h = s up p,  d_gate = a p up s'(gate),  d_up = a p s,  d_p = sum_i a_i s_i up_i,

each of these is rounded to bf16 on the way to an output, and gate, up and dh = a before them (some systems keep dh in fp32): a relative
error of one unit in each moves

    h       by gate s' up p (gate), h (up), h (itself)
    d_gate  by a p up gate s'' (gate), d_gate (up), d_gate (dh), d_gate (itself)
    d_up    by a p gate s' (gate), d_up (dh), d_up (itself)
    d_p's i-th term by a gate s' up (gate), itself (up), itself (dh)

and the row of dx, a rank's sum of rows, the sum of all and dw by their own length. The roundings are independent, so that the squares of what
they move add up, through the weights' or inputs' squares, to the square of an output's *scale*. A vector of outputs must satisfy

    |value - ref| <= (u + 2^-24 * (H + I + R)) * scale,        u = 2^-8,

in the Euclidean norm over H (dx), 2I (a column of dw13) or I (a row of dw2) elements with as many independent roundings, of which a typical
one is 0.4 u: a right output sits at about 0.4 of the tolerance. The second term bounds fp32 sums of H and I products and of an expert's R rows.
A router weight's gradient is one number, whose error is a normal variable of standard deviation 0.4 u: it gets six of them, 2.4 u.
Where gradients are added to fp32 main_grad, the difference before and after is judged, and 2^-24 of what stands there is allowed on top.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.distributed as dist

from mok_megatron.bench import oracle
from mok_megatron.bench.oracle import Reference, Verdict, compare
from mok_megatron.bench.problem import LayerProblem

SAMPLE_CHANNELS = 4
_ONE_NUMBER = 2.4
_UNIT = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
_FP32_UNIT = 2.0**-24


@dataclasses.dataclass(frozen=True)
class Gradients:
    """dx: [T, H]. d_router_weights: fp32 [T, K]. dw13: [E_local, 2I, H] and dw2: [E_local, H, I], bf16, or fp32 sums of many calls."""

    dx: torch.Tensor
    d_router_weights: torch.Tensor
    dw13: torch.Tensor
    dw2: torch.Tensor


@dataclasses.dataclass(frozen=True)
class WeightSample:
    """What is looked at of weight gradients: local experts, and hidden channels (columns of dw13, rows of dw2). n = experts * channels."""

    experts: tuple[int, ...]
    channels: torch.Tensor

    def read(self, dw13: torch.Tensor, dw2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the sample: [n, 2I], [n, I]."""
        return torch.cat([dw13[e][:, self.channels].T for e in self.experts]), torch.cat([dw2[e][self.channels] for e in self.experts])

    def write(self, dw13: torch.Tensor, dw2: torch.Tensor, values: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Put back what `read` returned."""
        for index, expert in enumerate(self.experts):
            mine = slice(index * len(self.channels), (index + 1) * len(self.channels))
            dw13[expert][:, self.channels] = values[0][mine].T
            dw2[expert][self.channels] = values[1][mine]


@dataclasses.dataclass(frozen=True)
class GradientReference:
    """tokens: [S]. Values and scales in FP64: dx [S, H] and [S], d_p [S * K, 1] and [S * K], dw13 [n, 2I] and [n], dw2 [n, I] and [n].

    forward: of the same tokens. rows: the most rows of a sampled expert.
    """

    forward: Reference
    dx: tuple[torch.Tensor, torch.Tensor]
    d_router_weights: tuple[torch.Tensor, torch.Tensor]
    sample: WeightSample
    dw13: tuple[torch.Tensor, torch.Tensor]
    dw2: tuple[torch.Tensor, torch.Tensor]
    rows: int


class _Expert:
    """One expert's backward on some rows in FP64; names ending in 2 are squares of what roundings move, see above."""

    def __init__(self, x: torch.Tensor, p: torch.Tensor, dy: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> None:
        p = p.double()[:, None]
        self.weights = w13.double()
        gate, up = (x.double() @ self.weights.T).chunk(2, dim=1)
        sigma = torch.sigmoid(gate)
        act, slope = gate * sigma, sigma * (1 + gate * (1 - sigma))
        moved, bent = gate * slope, gate * sigma * (1 - sigma) * (2 + gate * (1 - 2 * sigma))
        a = dy.double() @ w2.double()
        self.h = act * up * p
        self.h2 = (moved * up * p).square() + 2 * self.h.square()
        terms = a * act * up
        self.d_p = terms.sum(1)
        self.d_p2 = ((a * moved * up).square() + 2 * terms.square()).sum(1)
        d_gate, d_up = a * p * up * slope, a * p * act
        self.d13 = torch.cat([d_gate, d_up], 1)
        self.d13_2 = torch.cat([(a * p * up * bent).square() + 3 * d_gate.square(), (a * p * moved).square() + 2 * d_up.square()], 1)

    def dx(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [n, H] and their squared scales [n]: what moves d13, the rounding of the row, and its part in two sums."""
        rows = self.d13 @ self.weights
        return rows, self.d13_2 @ self.weights.square().sum(1) + 3 * rows.square().sum(1)

    def weight_grads(self, x: torch.Tensor, dy: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """x, dy: [n, C], the sampled channels. Values [C, 2I], [C, I], each with its scales [C]."""
        x, dy = x.double(), dy.double()
        dw13, dw2 = x.T @ self.d13, dy.T @ self.h
        moved13 = x.square().T @ self.d13_2.sum(1) + dw13.square().sum(1)
        moved2 = dy.square().T @ self.h2.sum(1) + dw2.square().sum(1)
        return (dw13, moved13.sqrt()), (dw2, moved2.sqrt())


def make_reference(problem: LayerProblem, forward: Reference, seed: int = 0) -> GradientReference:
    """The reference of this rank's sample, tokens as in ``forward``. Collective, as the forward's."""
    dx, d_p = _token_part(problem, forward.tokens)
    generator = torch.Generator().manual_seed(seed)
    hidden = problem.shape.hidden_size
    inner = 1 + torch.randperm(hidden - 2, generator=generator)[: SAMPLE_CHANNELS - 2]
    channels = torch.cat([torch.tensor([0, hidden - 1]), inner]).to(problem.x.device)
    sampled = _sampled_experts(problem)
    mine = sampled[problem.ranks.rank]
    first = problem.ranks.rank * problem.shape.experts_per_gpu
    rows = _rows_of(problem, [e for experts in sampled for e in experts])
    dw13, dw2, most = [], [], 0
    for expert in mine:
        x, p, dy = (torch.cat([rank[expert][i] for rank in rows]).to(problem.x.device) for i in range(3))
        expert_rows = _Expert(x, p, dy, problem.w13[expert - first], problem.w2[expert - first])
        part13, part2 = expert_rows.weight_grads(x[:, channels], dy[:, channels])
        dw13.append(part13)
        dw2.append(part2)
        most = max(most, len(x))
    joined = [tuple(torch.cat(pieces) for pieces in zip(*parts, strict=True)) for parts in (dw13, dw2)]
    return GradientReference(forward, dx, d_p, WeightSample(tuple(e - first for e in mine), channels), *joined, most)


def _sampled_experts(problem: LayerProblem) -> list[list[int]]:
    """Of every rank, its busiest and its idlest expert (global ids)."""
    counts = problem.expert_rows().sum(0).view(problem.ranks.ep_size, -1)
    first = [rank * problem.shape.experts_per_gpu for rank in range(problem.ranks.ep_size)]
    return [sorted({start + int(row.argmax()), start + int(row.argmin())}) for start, row in zip(first, counts, strict=True)]


def _rows_of(problem: LayerProblem, experts: list[int]) -> list[dict[int, tuple[torch.Tensor, ...]]]:
    """Of every rank, what it sends to each of these experts: x, router weights and dy, on the CPU."""
    sent = {}
    for expert in experts:
        token, slot = torch.nonzero(problem.topk_experts == expert, as_tuple=True)
        sent[expert] = tuple(t.cpu() for t in (problem.x[token], problem.router_weights[token, slot], problem.dy[token]))
    return problem.ranks.gather(sent)


def _token_part(problem: LayerProblem, tokens: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    own, device = tokens.to(problem.x.device), problem.x.device
    mine = (problem.x, problem.router_weights, problem.topk_experts, problem.dy)
    samples = problem.ranks.gather(tuple(t[own].cpu() for t in mine))
    x, p, routes, dy = (torch.cat(parts).to(device) for parts in zip(*samples, strict=True))
    dx, dx2 = torch.zeros(x.shape, dtype=torch.float64, device=device), torch.zeros(len(x), dtype=torch.float64, device=device)
    d_p, d_p2 = (torch.zeros(p.shape, dtype=torch.float64, device=device) for _ in range(2))
    first = problem.ranks.rank * problem.shape.experts_per_gpu
    for local in range(problem.shape.experts_per_gpu):
        token, slot = torch.nonzero(routes == first + local, as_tuple=True)
        if token.numel():
            expert = _Expert(x[token], p[token, slot], dy[token], problem.w13[local], problem.w2[local])
            rows, moved = expert.dx()
            dx[token] += rows  # an expert once a token: no index repeats
            dx2[token] += moved
            d_p[token, slot], d_p2[token, slot] = expert.d_p, expert.d_p2
    parts = [part.cpu() for part in (dx, dx2, d_p, d_p2)]
    if problem.ranks.host_group is not None:
        for part in parts:
            dist.all_reduce(part, group=problem.ranks.host_group)
    start = sum(len(sample[0]) for sample in samples[: problem.ranks.rank])
    dx, dx2, d_p, d_p2 = (part[start : start + len(tokens)].to(device) for part in parts)
    return (dx, dx2.sqrt()), (d_p.reshape(-1, 1), d_p2.sqrt().reshape(-1))


def tolerance(problem: LayerProblem, rows: int = 0, factor: float = 1.0) -> float:
    shape = problem.shape
    return factor * _UNIT[problem.x.dtype] + _FP32_UNIT * (shape.hidden_size + shape.intermediate_size + rows)


def judge(
    problem: LayerProblem,
    reference: GradientReference,
    gradients: Gradients,
    before: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Verdict:
    """The worst verdict of this rank's gradients: shapes, dtypes, every element finite, and the sample within the tolerances.

    before: the sample of fp32 weight gradients before the call that added to them; None where they are of this call alone.
    """
    wanted = {"dx": problem.x, "d_router_weights": problem.router_weights, "dw13": problem.w13, "dw2": problem.w2}
    for name, like in wanted.items():
        got, dtype = getattr(gradients, name), torch.float32 if before is not None and name in ("dw13", "dw2") else like.dtype
        if got.shape != like.shape or got.dtype != dtype:
            return Verdict(math.inf, 0.0, f"{name} is {list(got.shape)} {got.dtype}, must be {list(like.shape)} {dtype}")
    for name in ("dw13", "dw2"):
        # An expert at a time: the mask of all of them would be as large as the weights.
        bad = sum(int((~torch.isfinite(matrix)).sum()) for matrix in getattr(gradients, name))
        if bad:
            return Verdict(math.inf, 0.0, f"{name}: {bad} of {getattr(gradients, name).numel()} elements are not finite")
    tokens = reference.forward.tokens.to(problem.x.device)
    slots = (tokens[:, None] * problem.shape.topk + torch.arange(problem.shape.topk, device=tokens.device)).view(-1)
    verdicts = {
        "dx": compare(*reference.dx, gradients.dx, tokens, tolerance(problem)),
        "d_router_weights": compare(
            *reference.d_router_weights, gradients.d_router_weights.reshape(-1, 1), slots, tolerance(problem, factor=_ONE_NUMBER)
        ),
    }
    after = reference.sample.read(gradients.dw13, gradients.dw2)
    for index, name in enumerate(("dw13", "dw2")):
        (value, scale), got, allowed = getattr(reference, name), after[index].double(), tolerance(problem, reference.rows)
        if before is not None:
            standing = got.norm(dim=1)
            got = got - before[index].double()
            allowed += _FP32_UNIT * float(torch.where(scale > 0, standing / scale, 0.0).max())
        verdicts[name] = compare(value, scale, got, torch.arange(len(got), device=got.device), allowed)
    return worst(verdicts)


def worst(verdicts: dict[str, Verdict]) -> Verdict:
    """The verdict that is furthest out, its fault with its name."""
    name = max(verdicts, key=lambda name: oracle.distance(verdicts[name]))
    found = verdicts[name]
    return found if found.fault is None else dataclasses.replace(found, fault=f"{name}: {found.fault}")
