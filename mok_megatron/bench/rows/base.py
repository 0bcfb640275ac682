"""What a row of the benchmark is: one way to run the layer."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch

from mok_megatron.bench import gradients, oracle
from mok_megatron.bench.gradients import GradientReference, Gradients
from mok_megatron.bench.phases import BACKWARD, FORWARD, FORWARD_BACKWARD, PHASES
from mok_megatron.bench.problem import LayerProblem

_POISONED_BLOCKS = 4


class Row(ABC):
    """One way to run the layer of a problem. Making it allocates what the calls need and is a collective of the ranks.

    name: in options and JSON. label: in tables. phases: those that it has; one with a backward has :meth:`forward_backward`,
    :meth:`begin` and :meth:`backward`. wire: whether a token crosses the wire once a "route", once a rank ("token"), or not at all.
    roundings: of its forward, see oracle.py. accumulates: the weight gradients are added to the problem's fp32 main_grad.
    """

    name: ClassVar[str]
    label: ClassVar[str]
    phases: ClassVar[tuple[str, ...]] = (FORWARD,)
    wire: ClassVar[Literal["route", "token", "none"]] = "none"
    roundings: ClassVar[int] = oracle.ROUNDINGS
    is_layer: ClassVar[bool] = True  # False: a part of the layer, which has no rate of its own
    accumulates: ClassVar[bool] = False

    def __init__(self, problem: LayerProblem) -> None:
        self.problem = problem

    @classmethod
    def unavailable(cls, problem: LayerProblem) -> str | None:
        """Why the row cannot run here, "not installed" among others; None when it can. The same on every rank."""
        return None

    def waits_for_gpu(self, phase: str) -> bool:
        """Whether a call makes the host wait for the device, so that its host time says nothing."""
        return False

    @abstractmethod
    def forward(self) -> torch.Tensor:
        """One forward, issued to the current stream, nothing kept for a backward where that is a choice: y [T, H]."""

    def forward_backward(self) -> tuple[torch.Tensor, Any]:
        """One forward that keeps what the backward needs, and that backward for the problem's dy: y [T, H], and what `backward` returns."""
        raise NotImplementedError(f"{self.name} has no backward")

    def begin(self) -> None:
        """Run the forward whose context all calls of `backward` share. Not timed."""
        raise NotImplementedError(f"{self.name} has no backward")

    def backward(self) -> Any:
        """One backward for the problem's dy: the gradients in the method's own form."""
        raise NotImplementedError(f"{self.name} has no backward")

    def gradients(self, returned: Any) -> Gradients:
        """What `backward` returned in the form that is judged."""
        return returned

    def call(self, phase: str) -> Callable[[], Any]:
        """The call that is timed."""
        return {FORWARD: self.forward, FORWARD_BACKWARD: self.forward_backward, BACKWARD: self.backward}[phase]

    def verify(self, reference: oracle.Reference) -> oracle.Verdict:
        """Run the forward once and judge the output of this rank. ``reference`` is that of ``self.problem``."""
        return oracle.judge(self.problem, reference, self.forward_into_poison(), self.roundings)

    def verify_gradients(self, phase: str, reference: GradientReference) -> oracle.Verdict:
        """Run a phase with a backward once and judge all that it returns. ``reference`` is that of ``self.problem``."""
        before = reference.sample.read(*self.problem.main_grad.tensors()) if self.accumulates else None
        y, found = self.run_into_poison(phase)
        return self.judge_outputs(reference, y, found, before)

    def judge_outputs(
        self, reference: GradientReference, y: torch.Tensor | None, found: Gradients, before: tuple[torch.Tensor, torch.Tensor] | None
    ) -> oracle.Verdict:
        """The worst verdict of y, where there is one, and of the gradients."""
        verdict = gradients.judge(self.problem, reference, found, before)
        if y is None:
            return verdict
        return max(gradients.worst({"y": oracle.judge(self.problem, reference.forward, y, self.roundings)}), verdict, key=oracle.distance)

    def forward_into_poison(self) -> torch.Tensor:
        """forward, with NaN in the free memory that its output is likely to be given: what is not written must not look right."""
        self._poison(self.problem.x)
        return self.forward()

    def run_into_poison(self, phase: str) -> tuple[torch.Tensor | None, Gradients]:
        """A phase with a backward, its outputs in such memory, too. y is None for the backward alone."""
        self._poison(self.problem.x, self.problem.w13, self.problem.w2)
        returned = self.call(phase)()
        y, returned = returned if phase == FORWARD_BACKWARD else (None, returned)
        return y, self.gradients(returned)

    def _poison(self, rows: torch.Tensor, *weights: torch.Tensor) -> None:
        poison = [torch.full_like(rows, float("nan")) for _ in range(_POISONED_BLOCKS)]
        poison += [torch.full_like(weight, float("nan")) for weight in weights]
        del poison

    def close(self) -> None:
        """Let go of what outlives the object."""
        return


class AutogradRow(Row):
    """A row whose backward is torch's: `layer` builds the graph from `leaves`, all of which take gradients."""

    phases = PHASES

    def __init__(self, problem: LayerProblem) -> None:
        super().__init__(problem)
        self._leaves = tuple(leaf.detach().requires_grad_() for leaf in self.leaves())
        self._y: torch.Tensor | None = None

    def leaves(self) -> tuple[torch.Tensor, ...]:
        """x, router weights, w13 and w2 in the form in which `layer` takes them; views, no copies."""
        return self.problem.x, self.problem.router_weights, self.problem.w13, self.problem.w2

    @abstractmethod
    def layer(self, x: torch.Tensor, p: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, *, keep: bool) -> torch.Tensor:
        """y [T, H]; keep: a backward follows."""

    def forward(self) -> torch.Tensor:
        with torch.no_grad():
            return self.layer(*self._leaves, keep=False)

    def forward_backward(self) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        with torch.enable_grad():
            y = self.layer(*self._leaves, keep=True)
        return y.detach(), torch.autograd.grad(y, self._leaves, self.problem.dy)

    def begin(self) -> None:
        with torch.enable_grad():
            self._y = self.layer(*self._leaves, keep=True)

    def backward(self) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(self._y, self._leaves, self.problem.dy, retain_graph=True)

    def gradients(self, returned: tuple[torch.Tensor, ...]) -> Gradients:
        return Gradients(*returned)

    def close(self) -> None:
        self._y = None


def missing(module: str) -> str | None:
    """ "not installed" when the module cannot be found."""
    return None if importlib.util.find_spec(module) else f"not installed ({module})"
