"""forward, recompute_forward_context and backward against the FP64 oracle, over shapes, dtypes, EP sizes and ring sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mok_megatron import MoKConfig, functional
from tests.cpu.problems import (
    SMALLEST_RING,
    Batch,
    Run,
    assert_matches_oracle,
    assert_same_bits,
    even_tokens,
    execute,
    local_part,
    random_batch,
    run_on_rank,
    workspace_for,
)
from tests.distributed import RankPool, job_group

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@DTYPES
@pytest.mark.parametrize(("hidden", "intermediate", "experts", "topk"), [(64, 64, 4, 2), (128, 192, 8, 3), (320, 128, 4, 1), (64, 320, 16, 8)])
def test_one_rank_equals_the_oracle(seed: int, dtype: torch.dtype, hidden: int, intermediate: int, experts: int, topk: int) -> None:
    """Widths that are no multiple of any tile (192 and 320 = 128 + ...), without torch.distributed."""
    batch = random_batch(seed, 150, hidden=hidden, intermediate=intermediate, experts=experts, topk=topk, dtype=dtype)
    assert_matches_oracle(execute(None, batch, Run((150,))), batch.oracle())


@DTYPES
def test_shown_ep_4_ragged_ring_of_one_minibatch_equals_oracle_and_ep_1(ranks4: RankPool, seed: int, dtype: torch.dtype) -> None:
    """EP 4, ragged T including 0, a ring of one minibatch: all outputs and gradients within the oracle's bound, and EP 1's bits."""
    batch = random_batch(seed, 611, hidden=128, intermediate=192, experts=8, topk=3, dtype=dtype)
    spread = execute(ranks4, batch, Run((401, 0, 7, 203), SMALLEST_RING))
    assert min(spread.macrobatches()) >= 3, spread.macrobatches()
    assert_matches_oracle(spread, batch.oracle())
    alone = execute(None, batch, Run((611,), SMALLEST_RING))
    assert_same_bits(spread, alone)


@DTYPES
def test_ep_8_equals_oracle_and_ep_1(ranks8: RankPool, seed: int, dtype: torch.dtype) -> None:
    batch = random_batch(seed, 300, experts=16, topk=4, dtype=dtype)
    spread = execute(ranks8, batch, Run((60, 0, 90, 1, 49, 100, 0, 0), SMALLEST_RING))
    assert_matches_oracle(spread, batch.oracle())
    assert_same_bits(spread, execute(None, batch, Run((300,))))


@DTYPES
def test_weights_as_sequences_give_the_same_bits(ranks4: RankPool, seed: int, dtype: torch.dtype) -> None:
    batch = random_batch(seed, 100, dtype=dtype)
    whole = execute(ranks4, batch, Run((40, 60)))
    assert_same_bits(execute(ranks4, batch, Run((40, 60), weights_as_list=True)), whole)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 400),
    hidden=st.sampled_from([64, 128, 192]),
    intermediate=st.sampled_from([64, 128, 192]),
    experts=st.integers(1, 9),
    topk=st.integers(1, 4),
    missing=st.sampled_from([0.0, 0.3, 1.0]),
    ring=st.sampled_from([(128, 128), (128, 256), (256, 256), (128, None), (None, 384), (None, None)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_property_any_routing_and_ring_equals_the_oracle(
    seed: int,
    tokens: int,
    hidden: int,
    intermediate: int,
    experts: int,
    topk: int,
    missing: float,
    ring: tuple[int | None, int | None],
    dtype: torch.dtype,
) -> None:
    batch = random_batch(
        seed,
        tokens,
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        topk=min(topk, experts),
        missing=missing,
        dtype=dtype,
    )
    config = {"minibatch_size": ring[0], "macrobatch_size": ring[1]}
    got = execute(None, batch, Run((tokens,), config))
    functional.clear_workspaces()
    assert_matches_oracle(got, batch.oracle())


@pytest.mark.parametrize("example", range(8))
def test_property_any_split_over_ranks_equals_ep_1(ranks4: RankPool, seed: int, example: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (1,), generator=generator))]

    ep = draw(1, 2, 3, 4)
    tokens = tuple(draw(0, 1, 5, 64, 130, 300) for _ in range(ep))
    batch = random_batch(
        seed,
        sum(tokens),
        hidden=draw(64, 128),
        intermediate=draw(64, 192),
        experts=ep * draw(1, 2, 4),
        topk=1 if ep == 1 else 2,
        missing=draw(0.0, 0.5),
        dtype=draw(torch.float32, torch.bfloat16),
    )
    config = draw({}, SMALLEST_RING, {"minibatch_size": 128, "macrobatch_size": 256})
    got = execute(ranks4, batch, Run(tokens, config))
    assert_matches_oracle(got, batch.oracle())
    assert_same_bits(got, execute(None, batch, Run((sum(tokens),))))


@DTYPES
@pytest.mark.parametrize("config", [{}, SMALLEST_RING], ids=["whole", "ring"])
def test_recomputed_context_gives_the_same_backward(ranks4: RankPool, seed: int, dtype: torch.dtype, config: dict[str, Any]) -> None:
    batch = random_batch(seed, 200, experts=8, dtype=dtype)
    saved = execute(ranks4, batch, Run((150, 50), config))
    assert_same_bits(execute(ranks4, batch, Run((150, 50), config, recompute=True)), saved)


def _contexts(rank: int, batch: Batch, run: Run) -> tuple[list[torch.Tensor], list[torch.Tensor], bool]:
    config, workspace = workspace_for(batch, run, job_group())
    part = local_part(batch, run.tokens, rank)
    schedule = functional.build_schedule(workspace, config, part.topk_experts)
    operands = (config, workspace, schedule, part.x, part.router_weights, part.w13)
    y, saved = functional.forward(*operands, part.w2)
    again = functional.recompute_forward_context(*operands)
    bare, none = functional.forward(*operands, part.w2, save_context=False)
    rows = min(int(schedule.num_rows), workspace.macrobatch_size)
    copy = functional.MoKContext.from_tensors(saved.tensors())
    return [t[:rows] for t in copy.tensors()], [t[:rows] for t in again.tensors()], none is None and torch.equal(bare, y)


@DTYPES
@pytest.mark.parametrize("config", [{}, SMALLEST_RING], ids=["whole", "ring"])
def test_recomputed_context_equals_the_saved_one_bit_for_bit(ranks4: RankPool, seed: int, dtype: torch.dtype, config: dict[str, Any]) -> None:
    batch = random_batch(seed, 200, experts=8, dtype=dtype)
    for saved, again, no_context in ranks4.run(_contexts, batch, Run((150, 50), config), ranks=2):
        assert no_context
        for a, b in zip(saved, again, strict=True):
            assert a.shape[0] > 0 and torch.equal(a, b)


@DTYPES
@pytest.mark.parametrize("config", [{}, SMALLEST_RING], ids=["whole", "ring"])
def test_stale_buffer_contents_never_show(ranks4: RankPool, seed: int, dtype: torch.dtype, config: dict[str, Any]) -> None:
    """Every symmetric buffer and ring full of NaN before the step: same bits as with whatever was there."""
    routes = torch.zeros(90, 2, dtype=torch.int32)
    routes[:, 1] = torch.where(torch.arange(90) % 3 == 0, -1, 5)
    batch = random_batch(seed, 90, experts=8, dtype=dtype, routes=routes)
    for tokens in [(90,), (80, 10, 0, 0)]:
        clean = execute(ranks4, batch, Run(tokens, config))
        poisoned = execute(ranks4, batch, Run(tokens, config, poison=True, repeats=2))
        assert_same_bits(poisoned, clean)
        assert_matches_oracle(poisoned, batch.oracle())


def _interleaved(rank: int, first: Batch, second: Batch, run: Run) -> list[torch.Tensor]:
    """Two layers share the workspace: both forwards, then both backwards, each context used twice."""
    config, workspace = workspace_for(first, run, job_group())
    parts = [local_part(batch, run.tokens, rank) for batch in (first, second)]
    calls = []
    for part in parts:
        schedule = functional.build_schedule(workspace, config, part.topk_experts)
        y, context = functional.forward(config, workspace, schedule, part.x, part.router_weights, part.w13, part.w2)
        calls.append((schedule, context, y))
    results: dict[int, list[torch.Tensor]] = {}
    for index in (1, 0, 0):
        part, (schedule, context, y) = parts[index], calls[index]
        grads = functional.backward(config, workspace, schedule, context, part.dy, part.x, part.router_weights, part.w13, part.w2)
        if index in results:
            assert all(torch.equal(a, b) for a, b in zip(results[index][1:], grads, strict=True))
        results[index] = [y, *grads]
    return [*results[0], *results[1]]


@pytest.mark.parametrize("config", [{}, SMALLEST_RING], ids=["whole", "ring"])
def test_layers_and_microbatches_in_flight_do_not_disturb_each_other(ranks4: RankPool, seed: int, config: dict[str, Any]) -> None:
    batches = [random_batch(seed + i, 200, experts=8) for i in range(2)]
    run = Run((30, 0, 170, 0), config, num_local_tokens=200)
    parts = ranks4.run(_interleaved, *batches, run)
    for i, batch in enumerate(batches):
        alone = execute(None, batch, Run((200,)))
        for j, name in enumerate(("y", "dx", "d_router_weights", "dw13", "dw2")):
            assert torch.equal(torch.cat([p[5 * i + j] for p in parts]), getattr(alone, name)), (i, name)


def test_a_group_of_one_equals_no_group(ranks4: RankPool, seed: int) -> None:
    batch = random_batch(seed, 77)
    assert_same_bits(execute(ranks4, batch, Run((77,))), execute(None, batch, Run((77,))))


def test_ids_may_be_any_integer_type(seed: int) -> None:
    batch = random_batch(seed, 40)
    want = run_on_rank(0, batch, Run((40,)), False)
    for dtype in (torch.int64, torch.int16, torch.int8):
        batch.topk_experts = batch.topk_experts.to(dtype)
        assert torch.equal(run_on_rank(0, batch, Run((40,)), False)["y"], want["y"])


def test_no_autograd_graph_and_inputs_untouched(seed: int) -> None:
    batch = random_batch(seed, 50)
    leaves = [batch.x, batch.router_weights, batch.w13, batch.w2]
    before = [t.clone() for t in leaves]
    for tensor in leaves:
        tensor.requires_grad_()
    run = Run((50,))
    config, workspace = workspace_for(batch, run, None)
    schedule = functional.build_schedule(workspace, config, batch.topk_experts)
    y, context = functional.forward(config, workspace, schedule, batch.x, batch.router_weights, batch.w13, batch.w2)
    assert context is not None
    grads = functional.backward(config, workspace, schedule, context, batch.dy, batch.x, batch.router_weights, batch.w13, batch.w2)
    assert not any(isinstance(t, torch.Tensor) and t.requires_grad for t in (y, *grads))
    assert all(torch.equal(a.detach(), b) and a.grad is None for a, b in zip(leaves, before, strict=True))


def test_memory_is_reported_and_the_ring_is_its_size(seed: int) -> None:
    batch = random_batch(seed, 256, experts=8)
    run = Run((256,), SMALLEST_RING)
    _, small = workspace_for(batch, run, None)
    _, large = workspace_for(batch, Run((256,), {"minibatch_size": 128, "macrobatch_size": 1024}), None)
    assert small.macrobatch_size == 128 and large.macrobatch_size == 1024
    small_bytes, large_bytes = small.memory_bytes(), large.memory_bytes()
    assert all(size >= 0 for size in small_bytes.values()) and sum(small_bytes.values()) < sum(large_bytes.values())
    assert even_tokens(5, 2) == (2, 3) and MoKConfig().macrobatch_size is None
