"""The routed experts as one differentiable function over :mod:`mok_megatron.functional`.

Shape symbols: T local tokens, K routes a token, H hidden, I expert intermediate, E_local local experts.

Public: :func:`routed_experts`, for weights that get ordinary ``.grad``; and :class:`WeightBinding`, what a caller implements whose
weights want their gradients elsewhere (Megatron's ``main_grad``).

Nothing of a call is kept outside its own autograd node, so that any number of microbatches may be in flight, layers may be
re-entered and a forward may be run twice (activation recomputation). Tensors go through ``save_for_backward``: saved-tensor hooks
(offloading) see them. Parameters do not, since a sharding wrapper may re-point their storage between forward and backward; they
are read again when backward runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from mok_megatron import functional
from mok_megatron.config import MoKConfig

Weights = Tensor | Sequence[Tensor]
"""[E_local, ...] in one tensor, or E_local tensors."""


class WeightGradients(Protocol):
    """Where one backward pass writes the weight gradients."""

    main_grads: tuple[Any, Any]
    """For w13 and w2: what ``functional.backward`` takes as ``main_grads``."""
    overwrite: tuple[Any, Any]
    """For w13 and w2: what ``functional.backward`` takes as ``overwrite_main_grads``."""

    def finish(self) -> tuple[Tensor | None, ...]:
        """Called once they are written; the gradients to hand to autograd, one a parameter (None = none)."""
        ...


class WeightBinding(Protocol):
    """The experts' weights and what becomes of their gradients."""

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """Leaves of the autograd graph, in a fixed order; each takes part in every backward, also where no row reaches it."""
        ...

    def weights(self) -> tuple[Weights, Weights]:
        """(w13, w2) as the parameters hold them now: [E_local, 2I, H] and [E_local, H, I], or E_local tensors each."""
        ...

    def open_gradients(self) -> WeightGradients:
        """Targets for one backward pass."""
        ...


@dataclass(frozen=True)
class PlainWeights:
    """Weights whose gradients are returned to autograd. ``w13`` [E_local, 2I, H] and ``w2`` [E_local, H, I], or sequences."""

    w13: Weights
    w2: Weights

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return (*_as_tuple(self.w13), *_as_tuple(self.w2))

    def weights(self) -> tuple[Weights, Weights]:
        return self.w13, self.w2

    def open_gradients(self) -> WeightGradients:
        return _FreshGradients(self.w13, self.w2)


class _FreshGradients:
    """Gradients in new tensors of the weights' dtype; nothing for a weight that takes none."""

    def __init__(self, w13: Weights, w2: Weights) -> None:
        targets = [_fresh_like(w) for w in (w13, w2)]
        self.main_grads: tuple[Any, Any] = (targets[0], targets[1])
        self.overwrite: tuple[Any, Any] = (True, True)

    def finish(self) -> tuple[Tensor | None, ...]:
        return tuple(g for target in self.main_grads for g in ([target] if target is None else _as_tuple(target)))


def _fresh_like(weights: Weights) -> Tensor | list[Tensor | None] | None:
    if isinstance(weights, Tensor):
        return torch.empty_like(weights) if weights.requires_grad else None
    return [torch.empty_like(w) if w.requires_grad else None for w in weights]


def _as_tuple(weights: Any) -> tuple[Any, ...]:
    return (weights,) if isinstance(weights, Tensor) else tuple(weights)


@dataclass(frozen=True)
class _Call:
    """Everything of one forward that has no tensors but the parameters."""

    config: MoKConfig
    workspace: functional.MoKWorkspace
    binding: WeightBinding
    tag: functional.PassTag | None


def routed_experts(
    config: MoKConfig,
    workspace: functional.MoKWorkspace,
    schedule: functional.MoKSchedule,
    x: Tensor,
    router_weights: Tensor,
    weights: WeightBinding,
    *,
    tag: functional.PassTag | None = None,
) -> Tensor:
    """Dispatch, experts and combine, differentiable in x, router_weights and the weights. Collective over the workspace's group.

    Args:
        config: the tuning knobs.
        workspace: of this group and these shapes.
        schedule: of this call's routes (:func:`mok_megatron.functional.build_schedule`).
        x: [T, H] in the workspace's dtype.
        router_weights: [T, K] fp32; the gradient of a slot without a route is exactly 0.
        weights: the experts' weights.
        tag: layer and microbatch, for error messages.

    Returns:
        y [T, H] in the workspace's dtype.

    Raises:
        MoKError: see :func:`mok_megatron.functional.forward`; the same on every rank.
        NotImplementedError, RuntimeError: torch's own, for a tangent of forward-mode AD and under a transform of torch.func.
    """
    parameters = weights.parameters
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in (x, router_weights, *parameters))
    if not recorded and not _is_transformed():
        # A node that takes every parameter costs the host more than all else that is done here for an expert.
        y, _ = functional.forward(config, workspace, schedule, x, router_weights, *weights.weights(), save_context=False, tag=tag)
        return y
    return _RoutedExperts.apply(_Call(config, workspace, weights, tag), schedule, x, router_weights, *parameters)


def _is_transformed() -> bool:
    """Whether tensors may carry tangents or batches (forward-mode AD, torch.func), which the kernels would drop: the node refuses those."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


class _RoutedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, schedule: functional.MoKSchedule, x: Tensor, router_weights: Tensor, *parameters: Tensor) -> Tensor:
        w13, w2 = call.binding.weights()
        y, context = functional.forward(call.config, call.workspace, schedule, x, router_weights, w13, w2, tag=call.tag)
        schedule_tensors, ctx.join_schedule = schedule.split()
        ctx.schedule_count = len(schedule_tensors)
        ctx.save_for_backward(x, router_weights, *schedule_tensors, *context.tensors())
        ctx.call = call
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        call: _Call = ctx.call
        x, router_weights, *rest = ctx.saved_tensors
        schedule = ctx.join_schedule(*rest[: ctx.schedule_count])
        context = functional.MoKContext.from_tensors(tuple(rest[ctx.schedule_count :]))
        w13, w2 = call.binding.weights()
        gradients = call.binding.open_gradients()
        dx, d_router_weights, _, _ = functional.backward(
            call.config,
            call.workspace,
            schedule,
            context,
            dy.contiguous(),
            x,
            router_weights,
            w13,
            w2,
            main_grads=gradients.main_grads,
            overwrite_main_grads=gradients.overwrite,
            tag=call.tag,
        )
        wants_dx, wants_dp = ctx.needs_input_grad[2:4]
        return (None, None, dx if wants_dx else None, d_router_weights if wants_dp else None, *gradients.finish())
