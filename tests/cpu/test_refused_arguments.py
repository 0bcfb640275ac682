"""Arguments that would give a wrong result or break inside a pass are refused, and the workspace goes on."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest
import torch

from mok_megatron import MoKConfig, functional
from mok_megatron.errors import MoKArgumentError
from tests.cpu.problems import Batch, Run, random_batch, workspace_for

TOKENS = 20


@pytest.fixture
def batch(seed: int) -> Batch:
    return random_batch(seed, TOKENS)


def _schedule_of(topk: int = 2, experts: int = 4, tokens: int = TOKENS) -> functional.MoKSchedule:
    other = random_batch(1, tokens, experts=experts, topk=topk)
    config, workspace = workspace_for(other, Run((tokens,), num_local_tokens=TOKENS), None)
    return functional.build_schedule(workspace, config, other.topk_experts)


@pytest.mark.parametrize("sizes", [{"topk": 4}, {"experts": 8}, {"topk": 1}])
def test_a_schedule_of_another_workspace(batch: Batch, sizes: dict[str, int]) -> None:
    foreign = _schedule_of(**sizes)
    config, workspace = workspace_for(batch, Run((TOKENS,)), None)
    with pytest.raises(MoKArgumentError, match="schedule: is of another workspace"):
        functional.forward(config, workspace, foreign, batch.x, batch.router_weights, batch.w13, batch.w2)
    _works(batch)


def test_a_schedule_with_more_tokens_than_the_workspace_has(batch: Batch) -> None:
    """Of a larger workspace whose other sizes are the same, since padding hides ten tokens."""
    more = random_batch(2, TOKENS + 10)
    functional.clear_workspaces()  # one of an earlier test may be larger than asked
    config, larger = workspace_for(more, Run((TOKENS + 10,)), None)
    schedule = functional.build_schedule(larger, config, more.topk_experts)
    functional.clear_workspaces()
    _, workspace = workspace_for(batch, Run((TOKENS,)), None)
    assert schedule.sizes == (workspace.capacity_rows, workspace.num_local_experts, workspace.topk)
    with pytest.raises(MoKArgumentError, match=f"schedule: .* has {TOKENS + 10} tokens, must have at most num_local_tokens={TOKENS}"):
        functional.forward(config, workspace, schedule, more.x, more.router_weights, batch.w13, batch.w2)
    _works(batch)


def test_a_config_of_other_sizes(batch: Batch) -> None:
    _, workspace = workspace_for(batch, Run((TOKENS,)), None)
    with pytest.raises(MoKArgumentError, match=r"config\.minibatch_size=256: the workspace was made with None"):
        functional.build_schedule(workspace, MoKConfig(minibatch_size=256), batch.topk_experts)
    _works(batch)


def _works(batch: Batch) -> None:
    config, workspace = workspace_for(batch, Run((TOKENS,)), None)
    schedule = functional.build_schedule(workspace, config, batch.topk_experts)
    assert functional.forward(config, workspace, schedule, batch.x, batch.router_weights, batch.w13, batch.w2)[0].isfinite().all()


def _same_for_all(batch: Batch) -> tuple[object, object]:
    grad = torch.zeros_like(batch.w13[0])
    return [grad] * batch.experts, None


def _expanded(batch: Batch) -> tuple[object, object]:
    return torch.zeros_like(batch.w13[:1]).expand_as(batch.w13), None


def _repeated_column(batch: Batch) -> tuple[object, object]:
    return None, [torch.zeros(w.shape[0], 1).expand_as(w) for w in batch.w2]


@pytest.mark.parametrize("make", [_same_for_all, _expanded, _repeated_column])
def test_main_grads_that_share_memory(batch: Batch, make: Callable[[Batch], tuple[object, object]]) -> None:
    config, workspace = workspace_for(batch, Run((TOKENS,)), None)
    schedule = functional.build_schedule(workspace, config, batch.topk_experts)
    operands = (batch.x, batch.router_weights, batch.w13, batch.w2)
    _, context = functional.forward(config, workspace, schedule, *operands)
    with pytest.raises(MoKArgumentError, match=r"main_grads: .*share memory"):
        functional.backward(config, workspace, schedule, context, batch.dy, *operands, main_grads=make(batch))
    _works(batch)


def test_a_sparse_x(batch: Batch) -> None:
    config, workspace = workspace_for(batch, Run((TOKENS,)), None)
    schedule = functional.build_schedule(workspace, config, batch.topk_experts)
    with pytest.raises(MoKArgumentError, match=r"x: layout torch\.sparse_coo must be dense"):
        functional.forward(config, workspace, schedule, batch.x.to_sparse(), batch.router_weights, batch.w13, batch.w2)
    _works(batch)


@pytest.mark.parametrize("values", [("a", 0), (0, 1.5), (-1, 0), (True, 0)])
def test_a_tag_of_anything_but_numbers(values: tuple[object, object]) -> None:
    with pytest.raises(MoKArgumentError, match="of a PassTag: must be None or an integer"):
        functional.PassTag(*values)


def test_parameter_lists_and_numpy_integers_are_taken(batch: Batch) -> None:
    config, workspace = workspace_for(batch, Run((TOKENS,)), None)
    schedule = functional.build_schedule(workspace, config, batch.topk_experts)
    lists = [torch.nn.ParameterList(w.clone() for w in stacked) for stacked in (batch.w13, batch.w2)]
    got, _ = functional.forward(config, workspace, schedule, batch.x, batch.router_weights, *lists)
    want, _ = functional.forward(config, workspace, schedule, batch.x, batch.router_weights, batch.w13, batch.w2)
    assert torch.equal(got, want)
    sizes = (("num_local_tokens", TOKENS), ("hidden_size", 64), ("topk", 2), ("num_local_experts", 4), ("intermediate_size", 64))
    same = functional.get_workspace(config, None, device="cpu", dtype=torch.float32, **{name: numpy.int64(size) for name, size in sizes})
    assert same is workspace
