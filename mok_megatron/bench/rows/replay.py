"""MoK with a ring that holds about half of the busiest rank's rows, and by themselves the forward tasks that its backward repeats."""

from __future__ import annotations

import dataclasses
import math

import torch

from mok_megatron import functional
from mok_megatron.bench.gradients import GradientReference
from mok_megatron.bench.oracle import Verdict
from mok_megatron.bench.phases import BACKWARD
from mok_megatron.bench.problem import LayerProblem
from mok_megatron.bench.rows.mok import MoKRow
from mok_megatron.buffers import WorkspaceShape
from mok_megatron.config import MoKConfig
from mok_megatron.workspace import num_sms


@dataclasses.dataclass(frozen=True)
class ReplaySizes:
    """Rows, those of the busiest rank with its padding.

    rows: all of them. minibatch_size, macrobatch_size: of MoK's own workspace. halved_macrobatch_size: at least half of the rows, in whole
    minibatches, so that there is a second macrobatch wherever the rows are more than one minibatch.
    """

    rows: int
    minibatch_size: int
    macrobatch_size: int

    @property
    def halved_macrobatch_size(self) -> int:
        return math.ceil(self.rows / 2 / self.minibatch_size) * self.minibatch_size

    @property
    def recomputed_rows(self) -> int:
        """The first macrobatch, whose context recompute_forward_context makes."""
        return min(self.rows, self.halved_macrobatch_size)

    @property
    def replayed_rows(self) -> int:
        """The second macrobatch."""
        return self.rows - self.recomputed_rows


def replay_sizes(problem: LayerProblem) -> ReplaySizes:
    """Known before there is a workspace; the same on every rank."""
    shape, config = problem.shape, problem.shape.config
    workspace = WorkspaceShape(
        problem.ranks.ep_size,
        problem.max_tokens,
        shape.hidden_size,
        shape.topk,
        shape.experts_per_gpu,
        shape.intermediate_size,
        problem.x.dtype,
        config.minibatch_size,
        config.macrobatch_size,
        config.schedule_capacity_multiplier,
    )
    return ReplaySizes(max(problem.padded_rank_rows()), *workspace.ring(num_sms(problem.ranks.device)))


class MoKReplayRow(MoKRow):
    """MoK with two macrobatches on the busiest rank: its backward fetches x and runs the first GEMM again for the second one."""

    name = "mok_replay"
    label = "MoK, one macrobatch replayed"
    phases = (BACKWARD,)

    @classmethod
    def unavailable(cls, problem: LayerProblem) -> str | None:
        sizes = replay_sizes(problem)
        if sizes.rows <= sizes.minibatch_size:
            return f"the busiest rank's {sizes.rows} rows are one minibatch of {sizes.minibatch_size}: they cannot be two macrobatches"
        if sizes.rows > sizes.macrobatch_size:
            return f"the busiest rank's {sizes.rows} rows are more than MoK's own macrobatch of {sizes.macrobatch_size}: MoK replays, too"
        return None

    def make_config(self) -> MoKConfig:
        sizes = replay_sizes(self.problem)
        # The minibatch is set, too: the rule for it would look at the macrobatch, which alone is to differ.
        return dataclasses.replace(super().make_config(), minibatch_size=sizes.minibatch_size, macrobatch_size=sizes.halved_macrobatch_size)


class MoKRepeatedRow(MoKReplayRow):
    """The fetch of x and the first GEMM by themselves, for the rows of the first macrobatch: the tasks that a replay does for the second."""

    name = "mok_repeated"
    label = "forward tasks that it repeats"
    is_layer = False
    accumulates = False

    def backward(self) -> functional.MoKContext:
        p, (schedule, _) = self.problem, self._kept
        return functional.recompute_forward_context(self.config, self.workspace, schedule, p.x, p.router_weights, p.w13)

    def verify_gradients(self, phase: str, reference: GradientReference) -> Verdict:
        """The context that the forward kept, exactly, in all rows that the rank has."""
        schedule, kept = self._kept
        for tensor in kept.tensors():
            self._poison(tensor)
        found = self.call(phase)()
        rows = min(int(schedule.num_rows), self.workspace.macrobatch_size)
        for name in ("x_rows", "gate_up"):
            # Bits: numbers would call 0 and -0 equal, and NaN different from itself.
            got, wanted = (getattr(context, name)[:rows].view(torch.uint8) for context in (found, kept))
            differ = int((got != wanted).any(dim=1).sum())
            if differ:
                return Verdict(math.inf, 0.0, f"{name}: {differ} of {rows} rows differ from those that the forward keeps")
        return Verdict(0.0, 0.0)
