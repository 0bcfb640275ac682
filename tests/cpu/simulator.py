"""Adversarial simulator: the tasks and protocol steps of all ranks, interleaved in one process.

Every rank runs the same program of calls (schedule exchanges and passes). A pass has several workers for compute tickets and for communication
tickets; each takes the next ticket of its sequence, as a CTA would, and is a generator of the CPU executor that stops at every wait and between
the reading and the writing part of a task. The scheduler picks, step by step, which worker of which rank moves on.

What is an error here: a deadlock; a ring slot that is read before its rows are complete or written while a reader is due; a counter that ends
at another value than its number of tiles; NaN from memory that was poisoned when its owner left the pass; bits that differ from the reference.
"""

import collections
import dataclasses
import random
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from mok_megatron.executors.cpu import CpuPass, PassInputs, WeightGradTarget, exchange_routes
from mok_megatron.ops import AccessMode, Pass, RingBuffer, Task, TaskKind, route_schedule
from mok_megatron.protocol import CallKind, CallState, FlagWait, GroupProtocol, PassTag
from mok_megatron.schedule import MoKContext, MoKSchedule
from mok_megatron.workspace import MoKWorkspace, SymmetricBuffers, WorkspaceShape


class SimulationError(AssertionError):
    """The stream or the protocol broke a rule."""


@dataclasses.dataclass
class Layer:
    """One layer's data, global: routes [tokens, K], x, dy [tokens, H], weights p [tokens, K], w13 [E, 2I, H], w2 [E, H, I]."""

    routes: torch.Tensor
    x: torch.Tensor
    dy: torch.Tensor
    p: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor


@dataclasses.dataclass
class Call:
    """One call of the program: its kind and the index of its layer."""

    kind: CallKind
    layer: int


@dataclasses.dataclass
class Results:
    """Of one rank and layer, by name: y, dx, d_router_weights, dw13, dw2, context rows."""

    schedule: MoKSchedule | None = None
    context: MoKContext | None = None
    tensors: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)


def make_layer(rng: random.Random, routes: torch.Tensor, num_experts: int, hidden: int, inner: int, dtype: torch.dtype) -> Layer:
    generator = torch.Generator().manual_seed(rng.getrandbits(62))

    def normal(*sizes: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*sizes, generator=generator) * scale).to(dtype)

    tokens = routes.shape[0]
    return Layer(
        routes,
        normal(tokens, hidden),
        normal(tokens, hidden),
        torch.rand(routes.shape, generator=generator),
        normal(num_experts, 2 * inner, hidden, scale=hidden**-0.5),
        normal(num_experts, hidden, inner, scale=inner**-0.5),
    )


def random_routes(rng: random.Random, tokens: int, topk: int, num_experts: int, missing: float = 0.1) -> torch.Tensor:
    """Distinct experts in each row, some routes missing; expert loads are uneven on purpose."""
    weights = [rng.random() ** 3 + 1e-3 for _ in range(num_experts)]
    rows = []
    for _ in range(tokens):
        row: list[int] = []
        while len(row) < topk:
            expert = rng.choices(range(num_experts), weights)[0]
            if expert not in row:
                row.append(expert)
        rows.append([-1 if rng.random() < missing else expert for expert in sorted(row)])
    return torch.tensor(rows, dtype=torch.int32).view(tokens, topk)


@dataclasses.dataclass
class _Slot:
    macrobatch: int = -1
    writes: int = 0
    writing: int = 0
    reads: int = 0
    reading: int = 0


class RingMonitor:
    """Follows every access to a rank's rings in one pass."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.slots: dict[tuple[RingBuffer, int], _Slot] = collections.defaultdict(_Slot)
        self.expected: dict[tuple[RingBuffer, int, int, AccessMode], int] = collections.Counter()
        for task in tasks:
            for buffer, block, mode in self._accesses(task):
                self.expected[buffer, block, task.macrobatch, mode] += 1

    @staticmethod
    def _accesses(task: Task) -> list[tuple[RingBuffer, int, AccessMode]]:
        saved = (RingBuffer.SAVED_X, RingBuffer.SAVED_GATE_UP)
        return [
            (access.buffer, block, AccessMode.WRITE if access.mode & AccessMode.WRITE else AccessMode.READ)
            for access in task.accesses
            if access.buffer not in saved
            for block in range(access.first_block, access.first_block + access.num_blocks)
        ]

    def begin(self, task: Task) -> None:
        for buffer, block, mode in self._accesses(task):
            slot = self.slots[buffer, block]
            where = f"{buffer.name} slot {block} by {task.kind.name} of macrobatch {task.macrobatch}"
            if mode == AccessMode.WRITE:
                if slot.macrobatch != task.macrobatch:
                    due = self.expected[buffer, block, slot.macrobatch, AccessMode.READ]
                    if slot.writing or slot.reading or slot.reads != due:
                        raise SimulationError(f"write to {where} while macrobatch {slot.macrobatch} has {slot.reads} of {due} reads")
                    self.slots[buffer, block] = slot = _Slot(task.macrobatch)
                slot.writing += 1
            else:
                due = self.expected[buffer, block, task.macrobatch, AccessMode.WRITE]
                if slot.macrobatch != task.macrobatch or slot.writing or slot.writes != due:
                    raise SimulationError(f"read of {where}: it holds macrobatch {slot.macrobatch}, {slot.writes} of {due} writes")
                slot.reading += 1

    def end(self, task: Task) -> None:
        for buffer, block, mode in self._accesses(task):
            slot = self.slots[buffer, block]
            if mode == AccessMode.WRITE:
                slot.writing -= 1
                slot.writes += 1
            else:
                slot.reading -= 1
                slot.reads += 1


_BLOCK_COUNTERS = [TaskKind.DISPATCH, TaskKind.GEMM1, TaskKind.GEMM2, TaskKind.DISPATCH_DY, TaskKind.DGRAD2, TaskKind.DGRAD1]
_TRANSFERS = (TaskKind.DISPATCH, TaskKind.DISPATCH_DY, TaskKind.GEMM2, TaskKind.DGRAD1)


def expected_counters(one_pass: CpuPass) -> dict[int, int]:
    """What every counter must end at, from the kinds and places of the tasks, not from what they wait for or announce."""
    capacity, experts = one_pass.shape.capacity_blocks, one_pass.shape.num_local_experts
    expected: dict[int, int] = collections.Counter()
    for task in one_pass.tasks:
        if task.kind in _BLOCK_COUNTERS:
            expected[_BLOCK_COUNTERS.index(task.kind) * capacity + task.block] += 1
        if task.kind in (TaskKind.WGRAD2, TaskKind.WGRAD13, TaskKind.ZERO):
            expected[len(_BLOCK_COUNTERS) * capacity + task.expert] += 1
        if task.kind in _TRANSFERS:
            expected[len(_BLOCK_COUNTERS) * capacity + experts] += 1
    return expected


def _poison(buffers: SymmetricBuffers) -> None:
    for tensor in (buffers.x, buffers.dy, buffers.router_weights, buffers.combine, buffers.d_router_weights):
        tensor.fill_(float("nan"))


@dataclasses.dataclass
class Worker:
    """One generator that moves on when its wait is over. `order` is its task's place in the total order."""

    steps: Generator[Any, None, Any]
    order: int = -1
    kind: TaskKind | None = None
    wait: Any = None

    def runnable(self) -> bool:
        return self.wait is None or self.wait.ready()


class Rank:
    """One rank's program counter, workers and tickets."""

    def __init__(self, simulator: "Simulator", rank: int) -> None:
        self.simulator = simulator
        self.rank = rank
        self.workspace = simulator.workspaces[rank]
        self.results = [Results() for _ in simulator.layers]
        self.call_index = 0
        self.workers: list[Worker] = []
        self.one_pass: CpuPass | None = None
        self.tickets: dict[str, int] = {}
        self.stage = "idle"

    @property
    def finished(self) -> bool:
        return self.stage == "idle" and self.call_index == len(self.simulator.program)

    def advance_stage(self) -> None:
        """Start what comes next once the present stage's workers are through."""
        if self.workers or self.finished:
            return
        if self.stage == "idle":
            self._begin_call()
        elif self.stage == "enter":
            self._begin_work()
        elif self.stage == "work":
            self._check_counters()
            self.stage = "leave"
            self.workers = [Worker(self.one_pass.leave(), order=1 << 62)]
        else:
            self._end_call()

    def _begin_call(self) -> None:
        call = self.simulator.program[self.call_index]
        protocol = self.workspace.protocol
        state = CallState(protocol, protocol.call, call.kind, PassTag(call.layer), limit_seconds=1e9)
        layer, results = self.simulator.layers[call.layer], self.results[call.layer]
        tokens = self.simulator.token_slice(self.rank)
        if call.kind == CallKind.SCHEDULE:
            self.stage = "schedule"
            self.workers = [Worker(self._exchange(state, layer.routes[tokens], results))]
            return
        shape = self.workspace.shape
        experts = slice(self.rank * shape.num_local_experts, (self.rank + 1) * shape.num_local_experts)
        inputs = PassInputs(layer.x[tokens], layer.p[tokens], list(layer.w13[experts]), list(layer.w2[experts]))
        if call.kind == CallKind.BACKWARD:
            inputs.dy, inputs.context = layer.dy[tokens], results.context
            results.tensors["dw13"] = torch.full_like(layer.w13[experts], float("nan"))
            results.tensors["dw2"] = torch.full_like(layer.w2[experts], float("nan"))
            inputs.grads13 = [WeightGradTarget(tensor, True) for tensor in results.tensors["dw13"]]
            inputs.grads2 = [WeightGradTarget(tensor, True) for tensor in results.tensors["dw2"]]
        else:
            rows = self.workspace.macrobatch_size
            inputs.context = MoKContext(
                torch.full((rows, shape.hidden_size), float("nan"), dtype=shape.dtype),
                torch.full((rows, 2 * shape.intermediate_size), float("nan"), dtype=shape.dtype),
            )
        self.one_pass = self.simulator.pass_class(self.workspace, results.schedule, state, Pass(int(call.kind)), inputs)
        self.expected = expected_counters(self.one_pass)
        self.monitor = RingMonitor(self.one_pass.tasks)
        self.tickets = {"compute": 0, "comm": 0}
        self.stage = "enter"
        self.workers = [Worker(self.one_pass.enter())]

    def _exchange(self, state: CallState, routes: torch.Tensor, results: Results) -> Generator[Any, None, None]:
        gathered, num_tokens = yield from exchange_routes(self.workspace, state, routes)
        shape = self.workspace.shape
        tables = route_schedule(gathered, num_tokens, self.rank, shape.num_local_experts, shape.capacity_rows)
        results.schedule = MoKSchedule(routes.shape[0], *tables, topk_experts=routes)

    def _begin_work(self) -> None:
        self.stage = "work"
        rng = self.simulator.rng
        streams = ["compute"] * rng.randint(1, self.simulator.max_workers) + ["comm"] * rng.randint(1, self.simulator.max_workers)
        for stream in streams:
            worker = Worker(None)
            worker.steps = self._work(worker, stream)
            self.workers.append(worker)

    def _work(self, worker: Worker, stream: str) -> Generator[Any, None, None]:
        tasks = getattr(self.one_pass, stream).tasks
        while self.tickets[stream] < len(tasks):
            task = tasks[self.tickets[stream]]
            self.tickets[stream] += 1
            worker.order, worker.kind = task.order, task.kind
            steps = self.one_pass.work(task)
            started = False
            for wait in steps:
                if not started and wait is None:
                    # Waits are over and operands are read; what is written is not there yet.
                    self.monitor.begin(task)
                    started = True
                yield wait
            if not started:
                self.monitor.begin(task)
            self.monitor.end(task)
            yield None

    def _check_counters(self) -> None:
        for counter, value in enumerate(self.one_pass.counters):
            if value != self.expected.get(counter, 0):
                raise SimulationError(f"rank {self.rank}: counter {counter} ends at {value}, must be {self.expected.get(counter, 0)}")

    def _end_call(self) -> None:
        call = self.simulator.program[self.call_index]
        results = self.results[call.layer]
        if call.kind != CallKind.SCHEDULE:
            outputs, inputs = self.one_pass.outputs, self.one_pass.inputs
            if call.kind == CallKind.BACKWARD:
                results.tensors["dx"] = outputs.tokens.clone()
                results.tensors["d_router_weights"] = outputs.d_router_weights.clone()
            else:
                results.context = inputs.context
                if call.kind == CallKind.FORWARD:
                    results.tensors["y"] = outputs.tokens.clone()
            # The owner is free to reuse its buffers as soon as the pass has ended.
            _poison(self.workspace.mine)
        self.workspace.protocol.advance()
        self.one_pass = None
        self.stage = "idle"
        self.call_index += 1


Picker = Callable[[random.Random, list[tuple["Rank", Worker]]], tuple["Rank", Worker]]


def random_order(rng: random.Random, ready: list[tuple[Rank, Worker]]) -> tuple[Rank, Worker]:
    return rng.choice(ready)


def latest_first(rng: random.Random, ready: list[tuple[Rank, Worker]]) -> tuple[Rank, Worker]:
    return max(ready, key=lambda entry: (entry[1].order, rng.random()))


def starved(rank: int) -> Picker:
    """The rank moves only when nobody else can: it is late."""

    def pick(rng: random.Random, ready: list[tuple[Rank, Worker]]) -> tuple[Rank, Worker]:
        others = [entry for entry in ready if entry[0].rank != rank]
        return rng.choice(others or ready)

    return pick


def favoured(rank: int) -> Picker:
    """The rank moves whenever it can: it is ahead."""

    def pick(rng: random.Random, ready: list[tuple[Rank, Worker]]) -> tuple[Rank, Worker]:
        own = [entry for entry in ready if entry[0].rank == rank]
        return rng.choice(own or ready)

    return pick


def starved_workers(rng: random.Random, ready: list[tuple[Rank, Worker]]) -> tuple[Rank, Worker]:
    """The oldest task of every rank comes last: whatever does not wait for it runs ahead."""
    oldest = {rank.rank: min(worker.order for worker in rank.workers) for rank, _ in ready}
    others = [entry for entry in ready if entry[1].order != oldest[entry[0].rank]]
    return rng.choice(others or ready)


def starved_kind(kind: TaskKind) -> Picker:
    """Tasks of a kind come last, and in any order among themselves."""

    def pick(rng: random.Random, ready: list[tuple[Rank, Worker]]) -> tuple[Rank, Worker]:
        others = [entry for entry in ready if entry[1].kind != kind]
        return rng.choice(others or ready)

    return pick


def reversed_kind(kind: TaskKind) -> Picker:
    """Tasks of a kind come last, and the latest of them first: each overtakes every earlier one that it does not wait for."""

    def pick(rng: random.Random, ready: list[tuple[Rank, Worker]]) -> tuple[Rank, Worker]:
        others = [entry for entry in ready if entry[1].kind != kind]
        return rng.choice(others) if others else latest_first(rng, ready)

    return pick


class Simulator:
    """All ranks of a group in one process.

    Args:
        shape: of the workspaces; shape.num_local_tokens is the most any rank has.
        tokens: T of each rank; the layers' global rows are split in this order.
        layers, program: data and calls.
        pick: chooses the next worker among those that can move.
        protocol_class, pass_class: replaced to plant faults.
    """

    def __init__(
        self,
        shape: WorkspaceShape,
        tokens: Sequence[int],
        layers: Sequence[Layer],
        program: Sequence[Call],
        *,
        seed: int,
        pick: Picker = random_order,
        max_workers: int = 4,
        protocol_class: type[GroupProtocol] = GroupProtocol,
        pass_class: type[CpuPass] = CpuPass,
    ) -> None:
        self.rng = random.Random(seed)
        self.pick = pick
        self.layers, self.program, self.tokens = layers, program, tokens
        self.max_workers = max_workers
        self.pass_class = pass_class
        size = SymmetricBuffers.num_bytes(shape)
        buffers = [SymmetricBuffers.from_memory(shape, torch.zeros(size, dtype=torch.uint8)) for _ in range(shape.ep_size)]
        self.workspaces = [MoKWorkspace(shape, rank, buffers, device=torch.device("cpu")) for rank in range(shape.ep_size)]
        for workspace in self.workspaces:
            workspace.protocol = protocol_class(workspace.rank, [b.flags for b in buffers], torch.zeros(1, dtype=torch.int64))
            _poison(workspace.mine)
            for field in dataclasses.fields(workspace.rings):
                getattr(workspace.rings, field.name).fill_(float("nan"))
        self.ranks = [Rank(self, rank) for rank in range(shape.ep_size)]

    def token_slice(self, rank: int) -> slice:
        first = sum(self.tokens[:rank])
        return slice(first, first + self.tokens[rank])

    def run(self) -> list[list[Results]]:
        """Run the program to its end. Returns results by rank and layer.

        Raises:
            SimulationError: a rule was broken, or nobody can move.
        """
        with torch.no_grad():
            while True:
                for rank in self.ranks:
                    rank.advance_stage()
                if all(rank.finished for rank in self.ranks):
                    break
                ready = [(rank, worker) for rank in self.ranks for worker in rank.workers if worker.runnable()]
                if not ready:
                    if any(not rank.workers and not rank.finished for rank in self.ranks):
                        continue
                    raise SimulationError(self._describe_deadlock())
                rank, worker = self.pick(self.rng, ready)
                try:
                    worker.wait = next(worker.steps)
                except StopIteration:
                    rank.workers.remove(worker)
        return [rank.results for rank in self.ranks]

    def _describe_deadlock(self) -> str:
        lines = []
        for rank in self.ranks:
            waits = [
                f"{worker.wait.flag.name} of ranks {worker.wait.missing()}" if isinstance(worker.wait, FlagWait) else "a counter"
                for worker in rank.workers
            ]
            lines.append(f"rank {rank.rank} in call {rank.call_index}, stage {rank.stage}, waits for {waits}")
        return "deadlock: " + "; ".join(lines)


def reference(shape: WorkspaceShape, layers: Sequence[Layer]) -> list[dict[str, torch.Tensor]]:
    """Results of the global batch on one rank, one worker, tasks in the total order: the bits that every interleaving must give."""
    tokens = layers[0].x.shape[0]
    single = WorkspaceShape(1, tokens, shape.hidden_size, shape.topk, shape.num_experts, shape.intermediate_size, shape.dtype)
    program = [Call(kind, layer) for layer in range(len(layers)) for kind in (CallKind.SCHEDULE, CallKind.FORWARD, CallKind.BACKWARD)]
    simulator = Simulator(single, [tokens], layers, program, seed=0, pick=lambda _, ready: min(ready, key=lambda e: e[1].order), max_workers=1)
    return [results.tensors for results in simulator.run()[0]]


def check_results(actual: list[list[Results]], wanted: list[dict[str, torch.Tensor]]) -> None:
    """Compare the ranks' results, joined, with the reference, bit for bit.

    Raises:
        SimulationError: a difference, or a NaN.
    """
    for layer, expected in enumerate(wanted):
        names = actual[0][layer].tensors.keys()
        for name in names:
            joined = torch.cat([results[layer].tensors[name] for results in actual])
            if not torch.equal(joined, expected[name]):
                wrong = (joined != expected[name]).nonzero()[0].tolist()
                raise SimulationError(f"layer {layer}: {name}{wrong} is {joined[tuple(wrong)]}, must be {expected[name][tuple(wrong)]}")


__all__ = [
    "Call",
    "Layer",
    "SimulationError",
    "Simulator",
    "check_results",
    "favoured",
    "latest_first",
    "make_layer",
    "random_order",
    "random_routes",
    "reference",
    "starved",
    "starved_kind",
    "starved_workers",
]
