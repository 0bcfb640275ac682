"""MoK through its public functions."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from mok_megatron import functional
from mok_megatron.bench import oracle
from mok_megatron.bench.gradients import GradientReference, Gradients
from mok_megatron.bench.phases import BACKWARD, FORWARD, FORWARD_BACKWARD, PHASES
from mok_megatron.bench.problem import LayerProblem
from mok_megatron.bench.rows.base import Row
from mok_megatron.config import MoKConfig


class MoKRow(Row):
    """build_schedule and forward, the copy of the inputs into symmetric memory included, nothing kept where no backward follows.

    The backward adds to fp32 main_grad, a tensor an expert, as in training with Megatron.
    """

    name = "mok"
    label = "MoK"
    phases = PHASES
    wire = "route"
    accumulates = True

    def __init__(self, problem: LayerProblem) -> None:
        super().__init__(problem)
        shape = problem.shape
        self.config = self.make_config()
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
        self._kept: tuple[functional.MoKSchedule, functional.MoKContext] | None = None

    def make_config(self) -> MoKConfig:
        """The knobs of all calls, equal on all ranks."""
        return self.problem.shape.config

    def schedule(self) -> functional.MoKSchedule:
        return functional.build_schedule(self.workspace, self.config, self.problem.topk_experts)

    def forward(self) -> torch.Tensor:
        return self._forward(self.schedule(), save_context=False)[0]

    def _forward(self, schedule: functional.MoKSchedule, *, save_context: bool) -> tuple[torch.Tensor, functional.MoKContext | None]:
        p = self.problem
        return functional.forward(self.config, self.workspace, schedule, p.x, p.router_weights, p.w13, p.w2, save_context=save_context)

    def begin(self) -> None:
        schedule = self.schedule()
        self._kept = schedule, self._forward(schedule, save_context=True)[1]

    def backward(self) -> Gradients:
        return self._backward(*self._kept)

    def forward_backward(self) -> tuple[torch.Tensor, Gradients]:
        schedule = self.schedule()
        y, context = self._forward(schedule, save_context=True)
        return y, self._backward(schedule, context)

    @functools.cached_property
    def _targets(self) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
        """What `functional.backward` takes as main_grads."""
        w13, w2 = self.problem.main_grad.tensors()
        return list(w13.unbind(0)), list(w2.unbind(0))

    def _backward(self, schedule: functional.MoKSchedule, context: functional.MoKContext) -> Gradients:
        p = self.problem
        operands = (schedule, context, p.dy, p.x, p.router_weights, p.w13, p.w2)
        dx, d_p, dw13, dw2 = functional.backward(self.config, self.workspace, *operands, main_grads=self._targets)
        return Gradients(dx, d_p, *(p.main_grad.tensors() if self.accumulates else (dw13, dw2)))

    def memory(self) -> dict[str, Any]:
        """Bytes: what one call's context keeps, measured, beside what its sizes promise; the workspace's by purpose, once for all layers.

        A collective of the ranks.
        """
        _, context = self._forward(self.schedule(), save_context=True)
        return {
            "context_bytes": sum(tensor.nbytes for tensor in context.tensors()),
            "macrobatch_rows": self.workspace.macrobatch_size,
            "promised_context_bytes": self.workspace.context_bytes(),
            "workspace_bytes": self.workspace.memory_bytes(),
        }

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

    def verify_gradients(self, phase: str, reference: GradientReference) -> oracle.Verdict:
        """Right, and twice the same bits: dx, d_router_weights, and the sample of the weights' gradients from the same start."""
        sample, main_grad = reference.sample, self.problem.main_grad.tensors() if self.accumulates else None
        before = sample.read(*main_grad) if main_grad else None
        y, first = self.run_into_poison(phase)
        verdict = self.judge_outputs(reference, y, first, before)
        bits = [first.dx, first.d_router_weights, *sample.read(first.dw13, first.dw2)]
        if main_grad:
            sample.write(*main_grad, before)
        del first
        _, second = self.run_into_poison(phase)
        again = [second.dx, second.d_router_weights, *sample.read(second.dw13, second.dw2)]
        differ = sum(int((a != b).sum()) for a, b in zip(bits, again, strict=True))
        if verdict.fault is None and differ:
            return oracle.Verdict(verdict.error, verdict.tolerance, f"{differ} elements of the gradients differ between two runs")
        return verdict

    def close(self) -> None:
        self._kept = None


class MoKBf16GradRow(MoKRow):
    """The same with weight gradients of the call alone, returned in bf16: what the baselines do. Its forward is MoK's."""

    name = "mok_bf16grad"
    label = "MoK, bf16 weight grads"
    phases = (FORWARD_BACKWARD, BACKWARD)
    accumulates = False
    _targets = None


class MoKContextRow(MoKRow):
    """The forward, keeping what a backward needs."""

    name = "mok_context"
    label = "MoK, context kept"
    phases = (FORWARD,)

    def forward(self) -> torch.Tensor:
        return self._forward(self.schedule(), save_context=True)[0]


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
    phases = (FORWARD,)
    is_layer = False

    def forward(self) -> torch.Tensor:
        return self.schedule().expert_rows

    def verify(self, reference: oracle.Reference) -> oracle.Verdict:
        """The rows of every expert, exactly."""
        got, wanted = self.forward().tolist(), self.problem.local_expert_rows()
        return oracle.Verdict(0.0, 0.0) if got == wanted else oracle.Verdict(math.inf, 0.0, f"rows of the experts are {got}, must be {wanted}")
