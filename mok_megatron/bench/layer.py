"""Measure every row on one problem: check, time in turn, check again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from mok_megatron import functional
from mok_megatron.bench import gradients, oracle
from mok_megatron.bench.phases import BACKWARD, FORWARD, PHASES
from mok_megatron.bench.problem import LayerProblem
from mok_megatron.bench.rows import MoKAloneRow, MoKRepeatedRow, MoKReplayRow, MoKRow, MoKScheduleRow, Row
from mok_megatron.bench.timing import Clock, Reading, host_times, interleaved, slowest_rank

_HOST_READINGS = 3
Key = tuple[str, str]  # a row's name and a phase


@dataclasses.dataclass
class RowResult:
    """What came out for one phase of one row, the same on every rank.

    status: "ok"; "wrong" or "failed" (it raised), with the reason, before or after the timing; "skipped", with the reason. verdict: the
    worst of the ranks. readings: one a round, the slowest rank's; empty unless ok. host_us: a call's, of calls in a row, where it does not
    wait for the GPU. memory: of MoK, what a call's context and the workspace take.
    """

    row: type[Row]
    phase: str = FORWARD
    status: str = "ok"
    reason: str | None = None
    verdict: oracle.Verdict | None = None
    waits_for_gpu: bool = False
    readings: list[Reading] = dataclasses.field(default_factory=list)
    host_us: list[float] = dataclasses.field(default_factory=list)
    memory: dict[str, Any] | None = None


def measure(
    problem: LayerProblem, rows: Sequence[type[Row]], clock: Clock, *, iterations: int, warmup: int, phases: Sequence[str] = PHASES
) -> dict[Key, RowResult]:
    """Results by row name and phase. A collective call: the same rows and phases on every rank.

    With MoK among the rows, its schedule is also timed by itself where forwards are, and at EP > 1 MoK on one rank with the same rows. With
    its replay among them, the forward tasks that this repeats are timed by themselves where the backward alone is.
    """
    chosen = [*rows]
    if MoKRow in chosen:
        if FORWARD in phases:
            chosen.append(MoKScheduleRow)
        if problem.ranks.ep_size > 1:
            chosen.append(MoKAloneRow)
    if MoKReplayRow in chosen and BACKWARD in phases:
        chosen.append(MoKRepeatedRow)
    session = _Session(problem, phases)
    with torch.no_grad():
        for row in chosen:
            session.prepare(row)
        # A phase at a time: what is compared is measured next to each other.
        calls = {key: session.live[key[0]].call(key[1]) for key in sorted(session.right, key=lambda key: PHASES.index(key[1]))}
        readings = slowest_rank(problem.ranks, interleaved(clock, calls, iterations=iterations, warmup=warmup))
        alone = {key: call for key, call in calls.items() if not session.results[key].waits_for_gpu}
        host = problem.ranks.gather(host_times(clock, alone, iterations=_HOST_READINGS))
        for key in calls:
            if key in alone:
                session.results[key].host_us = [max(same) for same in zip(*(rank[key] for rank in host), strict=True)]
            # Once more: a row that spoils its own state over many calls was right only at first.
            if session.check(key, " after the timing"):
                session.results[key].readings = readings[key]
    results = session.results
    session.close()
    return results


class _Session:
    """The rows of one problem, the phases in which they are right so far, and the references that they are judged by."""

    def __init__(self, problem: LayerProblem, phases: Sequence[str]) -> None:
        self.problem = problem
        self.results: dict[Key, RowResult] = {}
        self.live: dict[str, Row] = {}
        self.right: list[Key] = []
        self._phases = [phase for phase in PHASES if phase in phases]
        self._references: list[tuple[LayerProblem, oracle.Reference, gradients.GradientReference | None]] = []

    def prepare(self, row: type[Row]) -> None:
        """Make the row and check each of its phases; it lives on when it is right on every rank in one of them."""
        phases = [phase for phase in self._phases if phase in row.phases]
        first = (row.name, phases[0] if phases else self._phases[0])
        result = self.results[first] = RowResult(row, first[1])
        reason = self._first(row.unavailable(self.problem))
        if reason is None and not phases:
            reason = f"has no other phase than {', '.join(row.phases)}"
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
        self.live[row.name] = made
        for phase in phases:
            key = row.name, phase
            self.results[key] = RowResult(row, phase, waits_for_gpu=made.waits_for_gpu(phase))
            if self.check(key):
                self.right.append(key)
        if not any(name == row.name for name, _ in self.right):
            del self.live[row.name]
            made.close()
        elif row is MoKRow:
            self.results[first].memory = made.memory()

    def check(self, key: Key, when: str = "") -> bool:
        """Judge one more output of the row's phase on every rank; the worst verdict counts."""
        (name, phase), verdict, fault = key, None, None
        result, row = self.results[key], self.live[name]
        forward, backward = self._references_of(row.problem)
        try:
            if phase == FORWARD:
                verdict = row.verify(forward)
            else:
                if phase == BACKWARD and not when:
                    row.begin()
                verdict = row.verify_gradients(phase, backward)
        except Exception as error:
            fault = _describe(error)
        fault = self._first(fault)
        verdicts = self.problem.ranks.gather(verdict)
        if fault is not None:
            result.status, result.reason = "failed", fault + when
            return False
        worst = max(range(len(verdicts)), key=lambda rank: oracle.distance(verdicts[rank]))
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

    def _references_of(self, problem: LayerProblem) -> tuple[oracle.Reference, gradients.GradientReference | None]:
        """Made once a problem: that of all ranks, and at EP > 1 that of a rank alone."""
        for known, forward, backward in self._references:
            if known is problem:
                return forward, backward
        forward = oracle.make_reference(problem)
        backward = gradients.make_reference(problem, forward) if self._phases != [FORWARD] else None
        self._references.append((problem, forward, backward))
        return forward, backward

    def _first(self, text: str | None) -> str | None:
        """The first rank's text that there is, the same on every rank."""
        texts = self.problem.ranks.gather(text)
        return next((f"rank {r}: {t}" if len(texts) > 1 and len(set(texts)) > 1 else t for r, t in enumerate(texts) if t), None)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
