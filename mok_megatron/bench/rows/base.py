"""What a row of the benchmark is: one way to run the layer."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch

from mok_megatron.bench import oracle
from mok_megatron.bench.problem import LayerProblem

_POISONED_BLOCKS = 4


class Row(ABC):
    """One way to run the layer of a problem. Making it allocates what the calls need and is a collective of the ranks.

    name: in options and JSON. label: in tables. waits_for_gpu: a call makes the host wait for the device, so that its host time says nothing.
    wire: whether a token crosses the wire once a "route", once a rank ("token"), or not at all. roundings: see oracle.py.
    A backward is added by a row that has it through a second phase in :meth:`phases`.
    """

    name: ClassVar[str]
    label: ClassVar[str]
    waits_for_gpu: ClassVar[bool] = False
    wire: ClassVar[Literal["route", "token", "none"]] = "none"
    roundings: ClassVar[int] = oracle.ROUNDINGS
    is_layer: ClassVar[bool] = True  # False: a part of the layer, which has no rate of its own

    def __init__(self, problem: LayerProblem) -> None:
        self.problem = problem

    @classmethod
    def unavailable(cls, problem: LayerProblem) -> str | None:
        """Why the row cannot run here, "not installed" among others; None when it can. The same on every rank."""
        return None

    @abstractmethod
    def forward(self) -> torch.Tensor:
        """One forward, issued to the current stream: y [T, H]."""

    def verify(self, reference: oracle.Reference) -> oracle.Verdict:
        """Run once and judge the output of this rank. ``reference`` is that of ``self.problem``."""
        return oracle.judge(self.problem, reference, self.forward_into_poison(), self.roundings)

    def forward_into_poison(self) -> torch.Tensor:
        """forward, with NaN in the free memory that its output is likely to be given: what is not written must not look right."""
        poison = [torch.full_like(self.problem.x, float("nan")) for _ in range(_POISONED_BLOCKS)]
        del poison
        return self.forward()

    def close(self) -> None:
        """Let go of what outlives the object."""
        return


def missing(module: str) -> str | None:
    """ "not installed" when the module cannot be found."""
    return None if importlib.util.find_spec(module) else f"not installed ({module})"
