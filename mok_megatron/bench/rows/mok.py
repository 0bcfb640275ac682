"""MoK through its public functions."""

from __future__ import annotations

import math

import torch

from mok_megatron import functional
from mok_megatron.bench import oracle
from mok_megatron.bench.problem import LayerProblem
from mok_megatron.bench.rows.base import Row


class MoKRow(Row):
    """build_schedule and forward, the copy of the inputs into symmetric memory included, nothing kept for a backward."""

    name = "mok"
    label = "MoK"
    wire = "route"
    save_context = False

    def __init__(self, problem: LayerProblem) -> None:
        super().__init__(problem)
        shape = problem.shape
        self.config = shape.config
        self.workspace = functional.get_workspace(
            self.config,
            problem.ranks.group,
            device=problem.ranks.device,
            num_local_tokens=problem.max_tokens,
            hidden_size=shape.hidden_size,
            topk=shape.topk,
            num_local_experts=shape.experts_per_gpu,
            intermediate_size=shape.intermediate_size,
            dtype=problem.x.dtype,
        )

    def schedule(self) -> functional.MoKSchedule:
        return functional.build_schedule(self.workspace, self.config, self.problem.topk_experts)

    def forward(self) -> torch.Tensor:
        p = self.problem
        schedule = self.schedule()
        return functional.forward(self.config, self.workspace, schedule, p.x, p.router_weights, p.w13, p.w2, save_context=self.save_context)[0]

    def verify(self, reference: oracle.Reference) -> oracle.Verdict:
        """Right, and twice the same bits."""
        first = self.forward_into_poison()
        verdict = oracle.judge(self.problem, reference, first, self.roundings)
        # Judging has waited for the GPU, so that a fault of the first run's kernels is raised by the second run.
        second = self.forward_into_poison()
        if verdict.fault is None and not torch.equal(first, second):
            fault = f"{int((first != second).sum())} of {first.numel()} elements differ between two runs"
            return oracle.Verdict(verdict.error, verdict.tolerance, fault)
        return verdict


class MoKContextRow(MoKRow):
    """The same, keeping what a backward needs."""

    name = "mok_context"
    label = "MoK, context kept"
    save_context = True


class MoKAloneRow(MoKRow):
    """MoK on one rank with as many rows an expert as this rank has in the group: what the layer costs without communication."""

    name = "mok_ep1"
    label = "MoK at EP 1, same rows"
    wire = "none"

    def __init__(self, problem: LayerProblem) -> None:
        super().__init__(problem.alone())


class MoKScheduleRow(MoKRow):
    """build_schedule by itself."""

    name = "mok_schedule"
    label = "MoK schedule alone"
    is_layer = False

    def forward(self) -> torch.Tensor:
        return self.schedule().expert_rows

    def verify(self, reference: oracle.Reference) -> oracle.Verdict:
        """The rows of every expert, exactly."""
        got, wanted = self.forward().tolist(), self.problem.local_expert_rows()
        return oracle.Verdict(0.0, 0.0) if got == wanted else oracle.Verdict(math.inf, 0.0, f"rows of the experts are {got}, must be {wanted}")
