"""Measure every row on one problem: check, time in turn, check again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from mok_megatron import functional
from mok_megatron.bench import oracle
from mok_megatron.bench.problem import LayerProblem
from mok_megatron.bench.rows import MoKAloneRow, MoKRow, MoKScheduleRow, Row
from mok_megatron.bench.timing import Clock, Reading, host_times, interleaved, slowest_rank

# The phase that is measured. A row with a backward gets a second call, under a second phase, beside its first.
PHASE = "forward"
_HOST_READINGS = 5


@dataclasses.dataclass
class RowResult:
    """What came out for one row, the same on every rank.

    status: "ok"; "wrong" or "failed" (it raised), with the reason, before or after the timing; "skipped", with the reason. verdict: the
    worst of the ranks. readings: one a round, the slowest rank's; empty unless ok. host_us: a call's, of calls in a row, where it does not
    wait for the GPU.
    """

    row: type[Row]
    status: str = "ok"
    reason: str | None = None
    verdict: oracle.Verdict | None = None
    waits_for_gpu: bool = False
    readings: list[Reading] = dataclasses.field(default_factory=list)
    host_us: list[float] = dataclasses.field(default_factory=list)


def measure(problem: LayerProblem, rows: Sequence[type[Row]], clock: Clock, *, iterations: int, warmup: int) -> dict[str, RowResult]:
    """Results by row name. A collective call: the same rows on every rank.

    With MoK among the rows, its schedule is also timed by itself, and at EP > 1 MoK on one rank with the same rows.
    """
    chosen = [*rows]
    if MoKRow in chosen:
        chosen.append(MoKScheduleRow)
        if problem.ranks.ep_size > 1:
            chosen.append(MoKAloneRow)
    session = _Session(problem)
    with torch.no_grad():
        for row in chosen:
            session.prepare(row)
        calls = {name: row.forward for name, row in session.live.items()}
        readings = slowest_rank(problem.ranks, interleaved(clock, calls, iterations=iterations, warmup=warmup))
        alone = {name: call for name, call in calls.items() if not session.live[name].waits_for_gpu}
        host = problem.ranks.gather(host_times(clock, alone, iterations=_HOST_READINGS))
        for name in calls:
            if name in alone:
                session.results[name].host_us = [max(same) for same in zip(*(rank[name] for rank in host), strict=True)]
            # Once more: a row that spoils its own state over many calls was right only at first.
            if session.check(name, " after the timing"):
                session.results[name].readings = readings[name]
    session.close()
    return session.results


class _Session:
    """The rows of one problem that are right so far, and the references that they are judged by."""

    def __init__(self, problem: LayerProblem) -> None:
        self.problem = problem
        self.results: dict[str, RowResult] = {}
        self.live: dict[str, Row] = {}
        self._references: dict[str, oracle.Reference] = {}
        self._shared = oracle.make_reference(problem)

    def prepare(self, row: type[Row]) -> None:
        """Make the row and check it; it lives on when it is right on every rank."""
        result = self.results[row.name] = RowResult(row)
        reason = self._first(row.unavailable(self.problem))
        if reason is not None:
            result.status, result.reason = "skipped", reason
            return
        made, fault = None, None
        try:
            made = row(self.problem)
        except Exception as error:  # a competitor that breaks must not take the others with it
            fault = _describe(error)
        fault = self._first(fault)
        if fault is not None or made is None:
            result.status, result.reason = "failed", fault
            return
        result.waits_for_gpu = made.waits_for_gpu
        self.live[row.name] = made
        self._references[row.name] = self._shared if made.problem is self.problem else oracle.make_reference(made.problem)
        if not self.check(row.name):
            del self.live[row.name]

    def check(self, name: str, when: str = "") -> bool:
        """Judge one more output of the row on every rank; the worst verdict counts."""
        result, verdict, fault = self.results[name], None, None
        try:
            verdict = self.live[name].verify(self._references[name])
        except Exception as error:
            fault = _describe(error)
        fault = self._first(fault)
        verdicts = self.problem.ranks.gather(verdict)
        if fault is not None:
            result.status, result.reason = "failed", fault + when
            return False
        worst = max(range(len(verdicts)), key=lambda rank: (verdicts[rank].fault is not None, verdicts[rank].error))
        result.verdict = verdicts[worst]
        if result.verdict.fault is not None:
            result.status, result.reason = "wrong", f"rank {worst}: {result.verdict.fault}{when}"
        return result.status == "ok"

    def close(self) -> None:
        for row in self.live.values():
            row.close()
        self.live.clear()
        # Nobody lets go of memory that a peer may still read.
        self.problem.ranks.barrier()
        functional.clear_workspaces()

    def _first(self, text: str | None) -> str | None:
        """The first rank's text that there is, the same on every rank."""
        texts = self.problem.ranks.gather(text)
        return next((f"rank {r}: {t}" if len(texts) > 1 and len(set(texts)) > 1 else t for r, t in enumerate(texts) if t), None)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
