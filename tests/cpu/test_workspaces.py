"""Several workspaces in one process: two groups side by side, layers of different shapes, growth of the whole group, closing."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from mok_megatron import functional
from tests.cpu.problems import Batch, Run, assert_same_bits, execute, join, local_part, random_batch, workspace_for
from tests.distributed import RankPool, job_group


def _step(rank: int, batch: Batch, run: Run, group: Any) -> dict[str, Any]:
    config, workspace = workspace_for(batch, run, group)
    part = local_part(batch, run.tokens, rank)
    schedule = functional.build_schedule(workspace, config, part.topk_experts)
    operands = (part.x, part.router_weights, part.w13, part.w2)
    y, context = functional.forward(config, workspace, schedule, *operands)
    dx, d_p, dw13, dw2 = functional.backward(config, workspace, schedule, context, part.dy, *operands)
    values = {"y": y, "dx": dx, "d_router_weights": d_p, "dw13": dw13, "dw2": dw2}
    return {
        **values,
        "expert_rows": schedule.expert_rows.tolist(),
        "num_rows": int(schedule.num_rows),
        "macrobatch_size": workspace.macrobatch_size,
    }


def _two_groups(rank: int, batches: list[Batch], runs: list[Run]) -> list[dict[str, Any]]:
    """Ranks 0, 1 and ranks 2, 3 are expert-parallel groups of their own, as with data parallelism over expert parallelism."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = rank // 2
    return [_step(rank % 2, batches[mine], runs[mine], groups[mine]) for _ in range(3)]


def test_two_groups_side_by_side(ranks4: RankPool, seed: int) -> None:
    batches = [random_batch(seed, 90), random_batch(seed + 1, 130)]
    runs = [Run((90, 0)), Run((60, 70))]
    parts = ranks4.run(_two_groups, batches, runs)
    for index, batch in enumerate(batches):
        want = execute(None, batch, Run((batch.x.shape[0],)))
        for repeat in range(3):
            assert_same_bits(join([parts[2 * index][repeat], parts[2 * index + 1][repeat]]), want)


def _two_shapes(rank: int, batches: list[Batch], runs: list[Run]) -> list[dict[str, Any]]:
    order = [0, 1, 1, 0, 1, 0]
    return [_step(rank, batches[i], runs[i], job_group()) for i in order]


def test_layers_of_different_shapes_take_turns(ranks4: RankPool, seed: int) -> None:
    batches = [random_batch(seed, 90, hidden=192, topk=3), random_batch(seed + 1, 90, hidden=64, experts=8, topk=1)]
    runs = [Run((30, 60)), Run((90, 0))]
    parts = ranks4.run(_two_shapes, batches, runs, ranks=2)
    wants = [execute(None, batch, Run((90,))) for batch in batches]
    for position, index in enumerate([0, 1, 1, 0, 1, 0]):
        assert_same_bits(join([p[position] for p in parts]), wants[index])


def _growth(rank: int, steps: list[tuple[Batch, Run]]) -> tuple[list[dict[str, Any]], list[int], bool]:
    results, sizes = [], []
    for batch, run in steps:
        results.append(_step(rank, batch, run, job_group()))
        sizes.append(workspace_for(batch, run, job_group())[1].num_local_tokens)
    old = workspace_for(*steps[-1], job_group())[1]
    dist.barrier(job_group())
    functional.clear_workspaces()
    dist.barrier(job_group())
    results.append(_step(rank, *steps[-1], job_group()))
    return results, sizes, workspace_for(*steps[-1], job_group())[1] is not old


def test_a_group_grows_together_and_starts_again_after_closing(ranks4: RankPool, seed: int) -> None:
    """64 tokens a rank, then 300, then few again (served by what is there); then everything is closed and made anew."""
    tokens = [(64, 10), (64, 300), (3, 5), (300, 0)]
    steps = []
    for i, counts in enumerate(tokens):
        batch = random_batch(seed + i, sum(counts), intermediate=128, experts=6)
        steps.append((batch, Run(counts, num_local_tokens=64 if i == 0 else 300)))
    pool = RankPool(2)  # of its own: clearing closes the workspaces of other tests on these ranks only
    try:
        results = pool.run(_growth, steps)
    finally:
        pool.close()
    assert [sizes for _, sizes, _ in results] == [[64, 300, 300, 300]] * 2
    assert all(new for _, _, new in results)
    for i, (batch, _) in enumerate([*steps, steps[-1]]):
        want = execute(None, batch, Run((batch.x.shape[0],)))
        assert_same_bits(join([parts[i] for parts, _, _ in results]), want)
