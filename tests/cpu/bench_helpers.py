"""Small problems, planted rows and a clock without noise, for the tests of the benchmark."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from mok_megatron.bench.layer import Key, RowResult, measure
from mok_megatron.bench.phases import BACKWARD, FORWARD
from mok_megatron.bench.problem import LayerProblem, Ranks, make_problem
from mok_megatron.bench.rows import COMPETITORS, MoKRepeatedRow, Row
from mok_megatron.bench.rows.replay import ReplaySizes, replay_sizes
from mok_megatron.bench.shapes import ModelShape
from mok_megatron.bench.timing import Reading
from mok_megatron.config import MoKConfig
from mok_megatron.functional import MoKContext
from tests.distributed import job_group

SHAPE = ModelShape("small", hidden_size=128, intermediate_size=192, topk=3, experts_per_gpu=4, config=MoKConfig(timeout_seconds=20.0))
CPU = torch.device("cpu")


class CountingClock:
    """Says that the n-th call took n milliseconds, and remembers who was called."""

    hides_us = 1000.0

    def __init__(self) -> None:
        self.called: list[tuple[str, str]] = []

    def time(self, call: Callable[[], Any]) -> Reading:
        call()
        phase = {"forward_backward": "forward+backward"}.get(call.__name__, call.__name__)
        self.called.append((call.__self__.name, phase))
        return Reading(float(len(self.called)), 10.0)

    def time_host(self, call: Callable[[], Any]) -> float:
        call()
        return 10.0


def here(ep_size: int, rank: int) -> Ranks:
    """This process among the ranks of the present test call."""
    return Ranks(0, 1, CPU) if ep_size == 1 else Ranks(rank, ep_size, CPU, job_group(), job_group())


def small_problem(ranks: Ranks, workload: str = "uniform", *, tokens: int = 40, seed: int = 7) -> LayerProblem:
    return make_problem(SHAPE, ranks, workload, tokens=tokens, seed=seed)


def measured(ranks: Ranks, rows: list[type[Row]], workload: str = "uniform", *, tokens: int = 40) -> dict[Key, RowResult]:
    return measure(small_problem(ranks, workload, tokens=tokens), rows, CountingClock(), iterations=2, warmup=1)


class LostRouteRow(COMPETITORS["nccl"]):
    """The router weight of the last slot is lost in every phase, on rank 1 where there is one."""

    name = "lost_route"
    label = "planted: a lost route"

    def layer(self, x: torch.Tensor, p: torch.Tensor, *weights: torch.Tensor, keep: bool) -> torch.Tensor:
        if self.problem.ranks.rank == self.problem.ranks.ep_size - 1:
            kept = torch.ones_like(p)
            kept[0, -1] = 0.0
            p = p * kept
        return super().layer(x, p, *weights, keep=keep)


class SpoiltLaterRow(COMPETITORS["nccl"]):
    """Right at first, not a number later."""

    name = "spoilt_later"
    label = "planted: right at first"
    phases = (FORWARD,)
    calls = 0

    def forward(self) -> torch.Tensor:
        self.calls += 1
        y = super().forward()
        if self.calls > 2:
            y[3, 5] = float("nan")
        return y


class RaisingRow(COMPETITORS["bare"]):
    """Raises, on one rank alone, when it is made."""

    name = "raising"
    label = "planted: raises"

    def __init__(self, problem: LayerProblem) -> None:
        if problem.ranks.rank == problem.ranks.ep_size - 1:
            raise RuntimeError("no such kernel")
        super().__init__(problem)


class HalfRow(COMPETITORS["nccl"]):
    """Half of the tokens."""

    name = "half"
    label = "planted: wrong shape"
    phases = (FORWARD,)

    def forward(self) -> torch.Tensor:
        return super().forward()[: self.problem.x.shape[0] // 2]


class LateBackwardRow(COMPETITORS["nccl"]):
    """Its backward alone doubles dw2 of one expert of the last rank after a few calls; the rest stays right."""

    name = "late_backward"
    label = "planted: a backward that is right at first"
    calls = 0

    def backward(self) -> tuple[torch.Tensor, ...]:
        self.calls += 1
        dx, d_p, dw13, dw2 = super().backward()
        ranks = self.problem.ranks
        if self.calls > 3 and ranks.rank == ranks.ep_size - 1:
            counts = self.problem.local_expert_rows()
            dw2[counts.index(max(counts))] *= 2.0
        return dx, d_p, dw13, dw2


class OneBitOffRow(MoKRepeatedRow):
    """The last element of the context that the last rank has is off by its last bit, and what lies behind it is not a number."""

    name = "one_bit_off"
    label = "planted: a context that is not the forward's"

    def backward(self) -> MoKContext:
        context, ranks = super().backward(), self.problem.ranks
        rows = min(int(self._kept[0].num_rows), self.workspace.macrobatch_size)
        if ranks.rank == ranks.ep_size - 1:
            context.gate_up.view(torch.int16)[rows - 1, -1] ^= 1
        for tensor in context.tensors():
            tensor[rows:] = float("nan")
        return context


def planted(rank: int, ep_size: int) -> dict[Key, tuple[str, str | None, int]]:
    """Status, reason and number of readings by row and phase, with the planted rows among good ones."""
    names = ("mok", "nccl", "bare")
    good = [COMPETITORS[name] for name in names]
    results = measured(here(ep_size, rank), [LostRouteRow, *good[:2], SpoiltLaterRow, RaisingRow, HalfRow, LateBackwardRow, good[2]])
    return {key: (result.status, result.reason, len(result.readings)) for key, result in results.items()}


def all_rows(rank: int, ep_size: int, workload: str, tokens: int) -> dict[Key, str]:
    """Status (and reason) by row and phase on one workload."""
    results = measured(here(ep_size, rank), list(COMPETITORS.values()), workload, tokens=tokens)
    return {key: result.status if result.status == "ok" else f"{result.status}: {result.reason}" for key, result in results.items()}


def idle_rank(rank: int, ep_size: int) -> dict[Key, str]:
    """The same where the last rank gets no row, since all tokens take the first three experts."""
    problem = small_problem(here(ep_size, rank))
    routes = tuple(torch.arange(3, dtype=torch.int32).repeat(len(table), 1) for table in problem.routes)
    problem = dataclasses.replace(problem, routes=routes, topk_experts=routes[rank])
    assert rank == 0 or problem.local_expert_rows() == [0] * 4
    rows = [COMPETITORS[name] for name in ("mok", "mok_bf16grad", "nccl", "bare")]
    results = measure(problem, rows, CountingClock(), iterations=1, warmup=0)
    return {key: result.status if result.status == "ok" else f"{result.status}: {result.reason}" for key, result in results.items()}


def replayed(rank: int, ep_size: int, light: bool) -> tuple[dict[Key, str], int, tuple[int, int, int], ReplaySizes]:
    """With MoK's replay among the rows, and a planted one: status (and reason) by row and phase; then this rank's rows as the replay's
    schedule counts them, the minibatches of MoK's and of the replay's workspace, the replay's macrobatch; and the sizes that were foreseen.

    light: all routes go to rank 0, but for one of each of its own tokens, so that rank 1 has less than a macrobatch.
    """
    shape = dataclasses.replace(SHAPE, config=dataclasses.replace(SHAPE.config, minibatch_size=128))
    problem = make_problem(shape, here(ep_size, rank), "uniform", tokens=90, seed=7)
    if light:
        takes = [0, 1, 4], [0, 1, 2]
        routes = tuple(torch.tensor(row, dtype=torch.int32).repeat(len(old), 1) for row, old in zip(takes, problem.routes, strict=True))
        problem = dataclasses.replace(problem, routes=routes, topk_experts=routes[rank])
    rows = [COMPETITORS["mok"], COMPETITORS["mok_replay"], OneBitOffRow]
    results = measure(problem, rows, CountingClock(), iterations=1, warmup=0, phases=[BACKWARD])
    statuses = {key: result.status if result.status == "ok" else f"{result.status}: {result.reason}" for key, result in results.items()}
    mok, replay = COMPETITORS["mok"](problem), COMPETITORS["mok_replay"](problem)
    made = mok.workspace.minibatch_size, replay.workspace.minibatch_size, replay.workspace.macrobatch_size
    return statuses, int(replay.schedule().num_rows), made, replay_sizes(problem)
