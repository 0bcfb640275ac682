"""The two CTAs of a cluster, which take tickets in pairs and keep step in their stages, never wait for each other for ever.

A model of the kernels' schedulers (csrc/kernels/sm90_tickets.cuh), stricter than they are: a tile is through only when the partner has been
handed as many stages, where the kernels let one CTA run some stages ahead. Whatever can move does, in random order; a pass is through when all
of its tasks are.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterator

import pytest

from mok_megatron.ops import Pass, PassShape, Task, TaskKind

from .test_task_stream import random_plan, streams

SEEDS = range(30)
SLOTS = 2
STAGE = 64


def stages(shape: PassShape, task: Task, frozen: bool) -> int:
    """Stages that a task's tile walks; weight gradients that nobody wants walk none."""
    match task.kind:
        case TaskKind.GEMM1 | TaskKind.DGRAD2:
            return shape.hidden // STAGE
        case TaskKind.GEMM2:
            return shape.intermediate // STAGE
        case TaskKind.DGRAD1:
            return 2 * shape.intermediate // STAGE
        case TaskKind.WGRAD2 | TaskKind.WGRAD13:
            return 0 if frozen else 2 * task.num_blocks
        case _:
            return 0


class Machine:
    def __init__(self, shape: PassShape, blocks: list[int], clusters: int, fetchers: int, frozen: bool) -> None:
        self.shape, self.frozen = shape, frozen
        self.compute, self.comm, num_counters = streams(shape, blocks)
        self.counters = [0] * num_counters
        self.signalled = False  # to the peers, which are as far as this rank: the final sums wait for their signal
        self.compute_tickets, self.comm_tickets = itertools.count(0, 2), itertools.count()
        self.workers: list[Iterator[bool]] = [self.fetch() for _ in range(fetchers)]
        for _ in range(clusters):
            mail: deque[int] = deque()
            ctas = Cta(), Cta()
            for rank in range(2):
                self.workers += [self.schedule(rank, ctas, mail), self.consume(ctas[rank], ctas[1 - rank])]

    def ready(self, task: Task) -> bool:
        if task.kind is TaskKind.REDUCE and not self.signalled:
            return False
        return all(self.counters[i] >= wait.target for wait in task.waits for i in range(wait.first, wait.first + wait.count))

    def bump(self, task: Task) -> None:
        for counter in task.bumps:
            self.counters[counter] += 1

    # Workers: each step yields whether it moved on.
    def fetch(self) -> Iterator[bool]:
        while (ticket := next(self.comm_tickets)) < len(self.comm):
            while not self.ready(self.comm[ticket]):
                yield False
            self.bump(self.comm[ticket])
            self.signalled |= self.comm[ticket].kind is TaskKind.SIGNAL_DONE
            yield True

    def schedule(self, rank: int, ctas: tuple[Cta, Cta], mail: deque[int]) -> Iterator[bool]:
        mine = ctas[rank]
        while True:
            if rank == 0:
                while mine.published - mine.announced == SLOTS:
                    yield mine.announce(self)
                first = next(self.compute_tickets)
                while len(mail) == SLOTS:
                    yield mine.announce(self)
                mail.append(first)
            else:
                while not mail:
                    yield mine.announce(self)
                first = mail.popleft()
            yield True
            pair = self.compute[first : first + 2]
            if not pair:
                break
            together = len(pair) == 2 and pair[0].kind == pair[1].kind
            counts = [stages(self.shape, task, self.frozen) for task in pair]
            assert not together or counts[0] == counts[1], pair
            for at, task in enumerate(pair):
                if at == rank:
                    while not self.ready(task):
                        yield mine.announce(self)
                elif together or counts[at] == 0:
                    continue
                while mine.published - mine.announced == SLOTS:
                    yield mine.announce(self)
                mine.publish(task if at == rank else None, counts[at])
                yield True
        while mine.announced < mine.published:
            yield mine.announce(self)
        mine.through = True

    def consume(self, mine: Cta, partner: Cta) -> Iterator[bool]:
        end = 0
        while not mine.through:
            if mine.stored == mine.published or end + mine.tiles[mine.stored][1] > partner.handed:
                yield False
                continue
            end += mine.tiles[mine.stored][1]
            mine.stored += 1
            yield True

    def run(self, rng: random.Random) -> None:
        """Until every worker is through. Some are slow: seldom picked while others can move."""
        left = {worker: rng.choice([1.0, 1.0, 0.02]) for worker in self.workers}

        def moves(worker: Iterator[bool]) -> bool:
            try:
                return next(worker)
            except StopIteration:
                del left[worker]
                return True

        while left:
            moved = [moves(worker) for worker, speed in rng.sample(list(left.items()), len(left)) if rng.random() <= speed]
            # Only when nobody at all can move is it a deadlock.
            assert any(moved) or not left or any([moves(worker) for worker in list(left)]), "nobody can move"


class Cta:
    """Tiles handed to the consumers, a task (None: keeping step) and its stages each."""

    def __init__(self) -> None:
        self.tiles: list[tuple[Task | None, int]] = []
        self.published = self.stored = self.announced = self.handed = 0
        self.through = False

    def publish(self, task: Task | None, count: int) -> None:
        self.tiles.append((task, count))
        self.published += 1
        self.handed += count

    def announce(self, machine: Machine) -> bool:
        if self.announced == self.stored:
            return False
        task = self.tiles[self.announced][0]
        if task is not None:
            machine.bump(task)
        self.announced += 1
        return True


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", [Pass.FORWARD, Pass.BACKWARD])
@pytest.mark.parametrize("seed", SEEDS)
def test_no_cluster_waits_for_itself(kind: Pass, seed: int, frozen: bool) -> None:
    rng = random.Random(seed)
    shape, blocks = random_plan(kind, seed)
    machine = Machine(shape, blocks, clusters=rng.choice([1, 2, 5]), fetchers=rng.choice([1, 2, 8]), frozen=frozen)
    machine.run(rng)
    wanted = [0] * len(machine.counters)
    for task in (*machine.compute, *machine.comm):
        for counter in task.bumps:
            wanted[counter] += 1
    assert machine.counters == wanted
