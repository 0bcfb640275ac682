"""What the differentiable function does where no graph is recorded, and what it refuses there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from mok_megatron import functional
from mok_megatron.autograd import PlainWeights, routed_experts
from tests.cpu.problems import Run, random_batch, workspace_for

Layer = Callable[[Tensor], Tensor]


def _layer(seed: int) -> tuple[Layer, Tensor]:
    """The layer as a function of x, and an x; nothing takes a gradient."""
    batch, run = random_batch(seed, 50), Run((50,))
    config, workspace = workspace_for(batch, run, None)
    schedule = functional.build_schedule(workspace, config, batch.topk_experts)
    weights = PlainWeights(batch.w13, batch.w2)
    return lambda x: routed_experts(config, workspace, schedule, x, batch.router_weights, weights), batch.x


def _tangent(layer: Layer, x: Tensor) -> Tensor | None:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(layer(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


TRANSFORMS: dict[str, Callable[[Layer, Tensor], object]] = {
    "tangent": _tangent,
    "jvp": lambda layer, x: torch.func.jvp(layer, (x,), (torch.ones_like(x),)),
    "jacfwd": lambda layer, x: torch.func.jacfwd(lambda t: layer(t).sum())(x),
    "grad": lambda layer, x: torch.func.grad(lambda t: layer(t).sum())(x),
    "vmap": lambda layer, x: torch.vmap(layer)(torch.stack([x, x])),
}


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_what_is_not_the_reverse_mode_is_refused_before_the_call(seed: int, name: str, mode: Callable[[], object]) -> None:
    """A derivative that is silently zero is a wrong number, and a call that fails inside takes the workspace with it."""
    layer, x = _layer(seed)
    y = layer(x)
    with mode(), pytest.raises((NotImplementedError, RuntimeError), match=r"jvp function|setup_context"):
        TRANSFORMS[name](layer, x)
    assert torch.equal(layer(x), y)


def test_a_level_of_forward_mode_without_tangents_changes_nothing(seed: int) -> None:
    layer, x = _layer(seed)
    y = layer(x)
    with forward_ad.dual_level():
        again = layer(x)
    assert torch.equal(again, y) and again.grad_fn is None
    leaf = x.clone().requires_grad_()
    with forward_ad.dual_level():
        layer(leaf).sum().backward()
    assert bool(leaf.grad.any())
