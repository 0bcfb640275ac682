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
        opened = [[_open(p) for p in parameters] for parameters in (w13, w2)]
        targets = [[None if t is None else v(t) for t, _, _ in kind] for kind, v in zip(opened, view, strict=True)]
        overwrites = [[overwrite for _, overwrite, _ in kind] for kind in opened]
        self.main_grads: tuple[Any, Any]
        self.overwrite: tuple[Any, Any]
        if stacked:
            self.main_grads = (targets[0][0], targets[1][0])
            self.overwrite = (overwrites[0][0], overwrites[1][0])
        else:
            self.main_grads = (targets[0], targets[1])
            self.overwrite = (overwrites[0], overwrites[1])
        self._finish = [finish for kind in opened for _, _, finish in kind]

    def finish(self) -> tuple[Tensor | None, ...]:
        """Marks what was added to ``main_grad``; one gradient a parameter, in the order w13, w2."""
        return tuple(finish() for finish in self._finish)


def _open(parameter: Tensor) -> tuple[Tensor | None, bool, Callable[[], Tensor | None]]:
    """(tensor to write, overwrite it, what gives autograd's gradient afterwards) for one parameter."""
    if not parameter.requires_grad:
        return None, False, lambda: None
    main_grad = fsdp.main_grad_of(parameter)
    if main_grad is None:
        fresh = torch.empty_like(parameter)
        return fresh, True, lambda: fresh
    _note_accumulation_dtype(main_grad)
    overwrite = bool(getattr(parameter, "overwrite_main_grad", False))
    return main_grad, overwrite, lambda: _announce(parameter)


def _announce(parameter: Any) -> Tensor | None:
    if not hasattr(parameter, "grad_added_to_main_grad"):
        # A wrapper that does not know the flag would add whatever it is given.
        return None
    parameter.grad_added_to_main_grad = True
    return dummy_gradient(parameter, zero=bool(getattr(parameter, "zero_out_wgrad", False)))


def dummy_gradient(parameter: Tensor, *, zero: bool) -> Tensor:
    """A gradient of the parameter's shape and dtype for autograd to pass around; all dummies of a kind share one memory.

    Detached anew each time: AccumulateGrad takes over a tensor that nobody else holds, and copies, weight-sized, one that
    somebody does.

    Args:
        parameter: whose gradient it stands for.
        zero: the wrapper adds it to ``main_grad`` after all (``zero_out_wgrad``), so it must be zeros.
    """
    key = (parameter.shape, parameter.dtype, parameter.device)
    if key not in _dummies:
        _dummies[key] = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    dummy = _dummies[key]
    if zero:
        dummy.zero_()
    return dummy.detach()


def _note_accumulation_dtype(main_grad: Tensor) -> None:
    global _warned_about_bf16
    if main_grad.dtype == torch.bfloat16 and not _warned_about_bf16:
        _warned_about_bf16 = True
        logger.warning(
            "expert gradients accumulate in BF16 main_grad: each microbatch is rounded to 8 bits. "
            "--accumulate-allreduce-grads-in-fp32 keeps them in FP32"
        )
