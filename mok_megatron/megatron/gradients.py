"""Where expert weight gradients go: Transformer Engine's contract with Megatron's data-parallel wrappers.

A parameter that has a ``main_grad`` gets its gradient added there by the backward pass itself (overwritten where the wrapper asks
for that), whether or not ``gradient_accumulation_fusion`` is set. The wrapper is told by ``grad_added_to_main_grad`` and still gets
a gradient through autograd, because its hooks sit on the parameter's AccumulateGrad node: a dummy of the right shape whose values
nobody reads. A parameter without ``main_grad`` gets an ordinary gradient.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mok_megatron.megatron import fsdp

logger = logging.getLogger(__name__)

View = Callable[[Tensor], Tensor]
"""Shows a parameter-shaped tensor as expert matrices ([out, in] or [E_local, out, in]), sharing its memory."""

_dummies: dict[tuple[torch.Size, torch.dtype, torch.device], Tensor] = {}
_warned_about_bf16 = False


class ExpertGradients:
    """The targets of one backward pass.

    Args:
        w13: parameters that hold fc1, in the order of the experts.
        w2: parameters that hold fc2.
        view: shows a tensor of a parameter's shape as expert matrices.
        stacked: one parameter holds all experts of a kind, viewed as [E_local, ...].
    """

    def __init__(self, w13: Sequence[Tensor], w2: Sequence[Tensor], view: tuple[View, View], stacked: bool) -> None:
        self._kinds = (_Kind(w13), _Kind(w2))
        targets: list[Any] = [kind.targets for kind in self._kinds]
        overwrites: list[Any] = [kind.overwrites for kind in self._kinds]
        if stacked:
            targets = [None if t is None else v(t) for (t,), v in zip(targets, view, strict=True)]
            overwrites = [overwrite for (overwrite,) in overwrites]
        self.main_grads: tuple[Any, Any] = (targets[0], targets[1])
        self.overwrite: tuple[Any, Any] = (overwrites[0], overwrites[1])

    def finish(self) -> tuple[Tensor | None, ...]:
        """Marks what was added to ``main_grad``; one gradient a parameter, in the order w13, w2."""
        return *self._kinds[0].finish(), *self._kinds[1].finish()


class _Kind:
    """The parameters of fc1 or of fc2. The loops cost the host their time at each backward, for every expert.

    Attributes: targets (tensors to write, None where none is wanted); overwrites (whether to write over them).
    """

    def __init__(self, parameters: Sequence[Any]) -> None:
        self.targets: list[Tensor | None] = []
        self.overwrites: list[bool] = []
        # What autograd gets: fresh gradients now, dummies in the end.
        self._gradients: list[Tensor | None] = [None] * len(parameters)
        self._parameters = parameters
        self._added: list[int] = []
        for index, parameter in enumerate(parameters):
            target, overwrite = None, False
            if parameter.requires_grad:
                target = fsdp.main_grad_of(parameter)
                if target is None:
                    target = self._gradients[index] = torch.empty_like(parameter)
                    overwrite = True
                else:
                    overwrite = bool(getattr(parameter, "overwrite_main_grad", False))
                    self._added.append(index)
            self.targets.append(target)
            self.overwrites.append(overwrite)
        if self._added:
            _note_accumulation_dtype(self.targets[self._added[0]])

    def finish(self) -> list[Tensor | None]:
        """As of :class:`ExpertGradients`."""
        dummy, zero = None, False
        for index in self._added:
            parameter = self._parameters[index]
            # A wrapper that does not know the flag would add whatever it is given.
            if not hasattr(parameter, "grad_added_to_main_grad"):
                continue
            parameter.grad_added_to_main_grad = True
            zero = zero or getattr(parameter, "zero_out_wgrad", False)
            if dummy is None:  # one for all: they are of one form, or the backward had refused them
                dummy = _dummy_like(parameter)
            # A tensor of its own each time: AccumulateGrad takes over one that nobody else holds, and copies, weight-sized, one that somebody
            # does. `data`, not detach(): half the time, and nothing watches the values.
            self._gradients[index] = dummy.data
        if zero:
            dummy.zero_()
        return self._gradients


def _dummy_like(parameter: Tensor) -> Tensor:
    """The memory of the gradients that autograd passes around for parameters of this form; nobody reads it.

    Except with ``zero_out_wgrad``, where the wrapper adds it to ``main_grad`` after all: it must be zeros then.
    """
    key = (parameter.shape, parameter.dtype, parameter.device)
    if key not in _dummies:
        _dummies[key] = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    return _dummies[key]


def _note_accumulation_dtype(main_grad: Tensor) -> None:
    global _warned_about_bf16
    if main_grad.dtype == torch.bfloat16 and not _warned_about_bf16:
        _warned_about_bf16 = True
        logger.warning(
            "expert gradients accumulate in BF16 main_grad: each microbatch is rounded to 8 bits. "
            "--accumulate-allreduce-grads-in-fp32 keeps them in FP32"
        )
