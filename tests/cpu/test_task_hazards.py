"""Whatever two tasks both touch, and one of them writes, is ordered by counters: not by how long a task takes, nor by who works on it."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterator

import pytest

from mok_megatron.ops import AccessMode, Pass, PassShape, RingBuffer, Task, TaskKind

from .test_task_stream import random_plan, streams

SEEDS = range(40)


def predecessors(tasks: list[Task]) -> list[int]:
    """Of every task, in total order, the set of tasks that are through before it starts, as the bits of a number.

    A wait for a counter is a wait for the first tasks that move it, if those that move it beyond the target wait for these: asserted.
    """
    movers: dict[int, list[int]] = defaultdict(list)
    for at, task in enumerate(tasks):
        for counter in task.bumps:
            movers[counter].append(at)
    before = [0] * len(tasks)
    partial: set[tuple[int, int]] = set()
    for at, task in enumerate(tasks):
        for wait in task.waits:
            for counter in range(wait.first, wait.first + wait.count):
                assert len(movers[counter]) >= wait.target
                for mover in movers[counter][: wait.target]:
                    assert mover < at
                    before[at] |= before[mover] | 1 << mover
                if len(movers[counter]) > wait.target:
                    partial.add((counter, wait.target))
    for counter, target in partial:
        first = sum(1 << mover for mover in movers[counter][:target])
        assert all(before[mover] & first == first for mover in movers[counter][target:])
    return before


def touched(kind: Pass, task: Task) -> Iterator[tuple[Hashable, bool, Hashable]]:
    """What a task touches, whether it writes it, and whose part of it: tasks with equal parts write different rows or columns."""
    part = (task.kind, task.block)
    for access in task.accesses:
        for block in range(access.first_block, access.first_block + access.num_blocks):
            yield (RingBuffer(access.buffer), block), bool(access.mode & AccessMode.WRITE), part
    if kind is Pass.BACKWARD:
        # Router weights come with dy; each tile of a row's dgrad2 leaves a partial sum, which the first tile of its dgrad1 adds up.
        if task.kind in (TaskKind.DISPATCH_DY, TaskKind.DGRAD2):
            yield ("weights", task.ring_block), task.kind is TaskKind.DISPATCH_DY, part
        if task.kind is TaskKind.DGRAD2 or (task.kind is TaskKind.DGRAD1 and task.tile_n == 0):
            yield ("partials", task.ring_block), task.kind is TaskKind.DGRAD2, part
    elif task.kind in (TaskKind.DISPATCH, TaskKind.GEMM1):
        yield ("weights", task.ring_block), task.kind is TaskKind.DISPATCH, part
    for writes in [False] * task.continues + [True] * task.continued:
        yield ("scratch", task.kind, task.tile_m, task.tile_n), writes, (task.expert, task.macrobatch)


def check(kind: Pass, shape: PassShape, blocks: list[int]) -> None:
    compute, comm, _ = streams(shape, blocks)
    tasks = sorted(compute + comm, key=lambda task: task.order)
    before = predecessors(tasks)
    places: dict[Hashable, list[tuple[int, bool, Hashable]]] = defaultdict(list)
    for at, task in enumerate(tasks):
        for place, writes, part in touched(kind, task):
            places[place].append((at, writes, part))
    for place, accesses in places.items():
        for (one, one_writes, one_part), (other, other_writes, other_part) in itertools.combinations(accesses, 2):
            if one == other or not (one_writes or other_writes) or one_part == other_part:
                continue
            assert before[other] >> one & 1, (place, tasks[one], tasks[other])


@pytest.mark.parametrize("kind", list(Pass))
@pytest.mark.parametrize("seed", SEEDS)
def test_what_two_tasks_touch_is_ordered_by_counters(kind: Pass, seed: int) -> None:
    shape, blocks = random_plan(kind, seed)
    check(kind, shape, blocks)


@pytest.mark.parametrize("between", [0, 1, 3])
def test_the_scratch_tile_is_read_before_another_expert_writes_it(between: int) -> None:
    """The first expert goes on in the second macrobatch; the next one that goes on comes `between` macrobatches later, in other slots."""
    blocks = [5, 3, *[4] * between, 2, 4]
    shape = PassShape(Pass.BACKWARD, 0, 1, 100, 256, 256, len(blocks), 1, 4, sum(blocks))
    check(Pass.BACKWARD, shape, blocks)
