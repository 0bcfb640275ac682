"""Every pass's tickets, by their structure: one total order, each tile and row once, and no wait that lower tasks do not fulfil."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
import torch

from mok_megatron import ops
from mok_megatron.ops import Pass, PassShape, PeerWait, Stream, Task, TaskKind

TILES = ops.tile_sizes()
SEEDS = range(12)


def random_plan(kind: Pass, seed: int) -> tuple[PassShape, list[int]]:
    """A shape with a ring of one to many minibatches, and blocks of every expert: none, few or many."""
    rng = random.Random(1000 * seed + kind)
    experts = rng.choice([1, 2, 5, 16])
    blocks = [rng.choice([0, 0, 1, 2, 7, 30]) for _ in range(experts)]
    minibatch = rng.choice([1, 2, 5])
    shape = PassShape(
        kind,
        rank=rng.randrange(2),
        ep_size=2,
        num_tokens=rng.choice([0, 1, 77]),
        hidden=64 * rng.randint(1, 9),
        intermediate=64 * rng.randint(1, 9),
        num_local_experts=experts,
        minibatch_blocks=minibatch,
        macrobatch_blocks=minibatch * rng.choice([1, 2, 3, 40]),
        capacity_blocks=sum(blocks) + rng.randrange(3),
    )
    return shape, blocks


def streams(shape: PassShape, blocks: list[int]) -> tuple[tuple[Task, ...], tuple[Task, ...], int]:
    """Compute tasks, communication tasks, counters."""
    offsets = torch.tensor([0, *blocks]).cumsum(0) * TILES.block_rows
    compute, comm = (ops.task_stream(offsets, shape, stream) for stream in (Stream.COMPUTE, Stream.COMM))
    return compute.tasks, comm.tasks, compute.num_counters


@pytest.mark.parametrize("kind", list(Pass))
@pytest.mark.parametrize("seed", SEEDS)
def test_tasks_wait_for_lower_ones_alone(kind: Pass, seed: int) -> None:
    """The proof that no pass waits for itself, whatever the number of workers: walked in the one order, every counter is there in time."""
    compute, comm, num_counters = streams(*random_plan(kind, seed))
    for tickets in (compute, comm):
        assert all(a.order < b.order for a, b in itertools.pairwise(tickets))
    counters = [0] * num_counters
    orders = set()
    signalled = False
    for task in sorted(compute + comm, key=lambda task: task.order):
        assert task.order not in orders
        orders.add(task.order)
        # A wait for every peer's signal: no ring of ranks waits for itself where each gives its own one before.
        assert signalled or task.peer_wait is not PeerWait.DONE
        signalled |= task.kind is TaskKind.SIGNAL_DONE
        for wait in task.waits:
            assert all(counters[i] >= wait.target for i in range(wait.first, wait.first + wait.count)), task
        for counter in task.bumps:
            counters[counter] += 1


def rows_of(tasks: tuple[Task, ...], kind: TaskKind) -> list[int]:
    """Rows, or tokens, of all tasks of a kind, in order, each as often as it comes."""
    return sorted(row for task in tasks if task.kind is kind for row in range(task.first_row, task.first_row + task.num_rows))


@pytest.mark.parametrize("kind", list(Pass))
@pytest.mark.parametrize("seed", SEEDS)
def test_every_tile_and_row_comes_once(kind: Pass, seed: int) -> None:
    shape, blocks = random_plan(kind, seed)
    compute, comm, _ = streams(shape, blocks)
    total, ring = sum(blocks), shape.macrobatch_blocks
    wide, narrow = -(-shape.hidden // TILES.hidden_cols), -(-shape.intermediate // TILES.gate_up_cols)
    grad_wide = -(-shape.intermediate // TILES.activation_grad_cols)
    saved = min(total, ring)
    found = Counter(task.kind for task in compute + comm)
    gemm1 = {Pass.FORWARD: total, Pass.RECOMPUTE: saved, Pass.BACKWARD: total - saved}[kind] * narrow
    assert found[TaskKind.GEMM1] == gemm1
    assert found[TaskKind.GEMM2] == (total * wide if kind is Pass.FORWARD else 0)
    assert found[TaskKind.DGRAD2] == (total * grad_wide if kind is Pass.BACKWARD else 0)
    assert found[TaskKind.DGRAD1] == (total * wide if kind is Pass.BACKWARD else 0)
    assert found[TaskKind.SIGNAL_DONE] == 1
    places = Counter((task.kind, task.macrobatch, task.block, task.tile_n) for task in compute if task.block >= 0)
    assert all(count == 1 for count in places.values())

    tiles2 = -(-shape.hidden // TILES.wgrad_rows) * -(-shape.intermediate // TILES.wgrad_cols)
    tiles13 = -(-2 * shape.intermediate // TILES.wgrad_rows) * -(-shape.hidden // TILES.wgrad_cols)
    wanted: Counter[tuple[TaskKind, int, int]] = Counter()
    first = 0
    for expert, count in enumerate(blocks if kind is Pass.BACKWARD else []):
        if count == 0:
            wanted[TaskKind.ZERO, expert, 0] = tiles2 + tiles13
        else:
            # One part in every macrobatch that holds rows of the expert, over all of these rows.
            for macro in range(first // ring, (first + count - 1) // ring + 1):
                rows = min(first + count, (macro + 1) * ring) - max(first, macro * ring)
                wanted[TaskKind.WGRAD2, expert, rows] += tiles2
                wanted[TaskKind.WGRAD13, expert, rows] += tiles13
        first += count
    grads = [task for task in compute if task.kind in (TaskKind.WGRAD2, TaskKind.WGRAD13, TaskKind.ZERO)]
    assert Counter((task.kind, task.expert, task.num_blocks) for task in grads) == wanted
    assert len({(t.kind, t.macrobatch, t.expert, t.tile_m, t.tile_n, t.first_block) for t in grads}) == len(grads)

    block_rows = TILES.block_rows
    # The backward has the rows of x that the context kept, its first macrobatch's, and fetches x to replay the others.
    x = {Pass.FORWARD: (0, total), Pass.RECOMPUTE: (0, saved), Pass.BACKWARD: (saved, total)}[kind]
    dy = (0, total) if kind is Pass.BACKWARD else (0, 0)
    assert rows_of(comm, TaskKind.DISPATCH) == [*range(x[0] * block_rows, x[1] * block_rows)]
    assert rows_of(comm, TaskKind.DISPATCH_DY) == [*range(dy[0] * block_rows, dy[1] * block_rows)]
    for task in comm:
        if task.kind is not TaskKind.SIGNAL_DONE:
            last = task.first_row + task.num_rows - 1
            assert task.first_row // block_rows == last // block_rows == task.block and task.ring_block == task.block % ring
    assert rows_of(compute, TaskKind.REDUCE) == [*range(0 if kind is Pass.RECOMPUTE else shape.num_tokens)]


def order_of_weight_grads(rng: random.Random, blocks: list[int]) -> list[bool]:
    """Of a backward's products in the order of their tickets, whether they are weight gradients."""
    shape = PassShape(Pass.BACKWARD, 0, 1, 100, 64 * rng.randint(4, 12), 64 * rng.randint(4, 12), len(blocks), 8, 8 * 60, sum(blocks))
    compute, _, _ = streams(shape, blocks)
    return [task.kind in (TaskKind.WGRAD2, TaskKind.WGRAD13) for task in compute if task.kind is not TaskKind.REDUCE]


@pytest.mark.parametrize("seed", SEEDS)
def test_weight_gradients_of_few_rows_stand_between_the_other_products(seed: int) -> None:
    """They wait for memory while the others multiply: with many minibatches most come before the last of the others, in short runs."""
    rng = random.Random(seed)
    grads = order_of_weight_grads(rng, [rng.randint(3, 7) for _ in range(32)])
    end = len(grads) - grads[::-1].index(False)
    assert sum(grads[:end]) >= 0.7 * sum(grads)
    runs = sorted(sum(1 for _ in run) for grad, run in itertools.groupby(grads[:end]) if grad)
    # The place of a last, small minibatch has few others to stand between.
    assert runs[len(runs) // 2] <= 8, runs
    assert runs[-1] <= 64, runs


@pytest.mark.parametrize("seed", SEEDS)
def test_clusters_take_weight_gradients_in_pairs(seed: int) -> None:
    """Also behind an odd number of tickets: a cluster works on tasks of two kinds one after the other, at half its speed."""
    rng = random.Random(seed)
    blocks = [rng.choice([0, 1, 2, 3, 5]) for _ in range(24)]
    ring = rng.choice([9, 27, 3 * 40])
    # An odd number of tiles a block, in minibatches of an odd number of blocks.
    shape = PassShape(Pass.BACKWARD, 0, 1, 100, 256 * rng.choice([2, 3]), 256 * 3, len(blocks), 3, ring, sum(blocks))
    compute, _, _ = streams(shape, blocks)
    grads = [task.kind in (TaskKind.WGRAD2, TaskKind.WGRAD13, TaskKind.ZERO) for task in compute]
    split = sum(one != other for one, other in zip(grads[::2], grads[1::2], strict=False))
    # At most the last ticket of each minibatch's place: those of the minibatches, and four behind them, of each macrobatch.
    places = -(-sum(blocks) // shape.minibatch_blocks) + 4 * -(-sum(blocks) // ring)
    assert split <= places


@pytest.mark.parametrize("missing", [0, 1])
def test_weight_gradients_of_many_rows_follow(missing: int) -> None:
    """From 1536 rows an expert on, padded and on average; with one block less they do not."""
    grads = order_of_weight_grads(random.Random(missing), [7, 14, 12, 15 - missing])
    assert (grads == sorted(grads)) == (missing == 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_replay_is_a_minibatch_ahead_of_what_waits_for_it(seed: int) -> None:
    """Else the first tiles behind a replay would wait for its last wave, in every minibatch."""
    rng = random.Random(seed)
    blocks = [rng.randint(1, 9) for _ in range(16)]
    minibatch = rng.choice([2, 3, 8])
    shape = PassShape(Pass.BACKWARD, 0, 1, 10, 512, 512, len(blocks), minibatch, minibatch * 3, sum(blocks))
    compute, _, _ = streams(shape, blocks)
    replayed = {(t.macrobatch, t.minibatch): at for at, t in enumerate(compute) if t.kind is TaskKind.GEMM1}  # the last one's ticket
    firsts = {(t.macrobatch, t.minibatch): at for at, t in reversed(list(enumerate(compute))) if t.kind is TaskKind.DGRAD2}
    assert {macro for macro, _ in replayed} == set(range(1, -(-sum(blocks) // shape.macrobatch_blocks)))
    for macro, place in replayed:
        if (macro, place + 1) in replayed:
            assert replayed[macro, place + 1] < firsts[macro, place]


@pytest.mark.parametrize("blocks", [[4] * 12, [13] * 12, [0] * 12, [3, 0, 30, 0]])
def test_final_sums_of_a_backward_stand_between_the_last_weight_gradients(blocks: list[int]) -> None:
    """Behind half of those of the last place, and evenly: they wait for memory, and for peers."""
    shape = PassShape(Pass.BACKWARD, 1, 2, 32 * 40, 512, 512, len(blocks), 8, 8 * 60, sum(blocks))
    compute, comm, _ = streams(shape, blocks)
    kinds = [task.kind for task in compute]
    first = kinds.index(TaskKind.REDUCE)
    others = [kind for kind in kinds[first:] if kind is not TaskKind.REDUCE]
    assert set(others) <= {TaskKind.WGRAD2, TaskKind.WGRAD13, TaskKind.ZERO}
    dgrads = [at for at, kind in enumerate(kinds) if kind in (TaskKind.DGRAD1, TaskKind.DGRAD2)]
    behind = len(kinds) - 40 - (dgrads[-1] + 1 if dgrads else 0)  # a few of them of the place before
    assert behind // 3 <= len(others) <= behind // 2 + 1
    quarters = [
        kinds[first + i * (len(kinds) - first) // 4 : first + (i + 1) * (len(kinds) - first) // 4].count(TaskKind.REDUCE) for i in range(4)
    ]
    assert sum(quarters) == 40 and min(quarters) >= 7, quarters
    assert comm[-1].kind is TaskKind.SIGNAL_DONE and comm[-1].order < compute[first].order
