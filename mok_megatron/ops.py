"""One thin typed function per compiled operator (torch.ops.mok_megatron.*), with fake implementations for tracing."""

import dataclasses
import enum

import torch

from mok_megatron.build import load_library

load_library()
_OPS = torch.ops.mok_megatron


class Pass(enum.IntEnum):
    """A launch: the order of csrc/task/task.h."""

    FORWARD = 0
    RECOMPUTE = 1
    BACKWARD = 2


class Stream(enum.IntEnum):
    COMPUTE = 0
    COMM = 1


class TaskKind(enum.IntEnum):
    DISPATCH = 0
    DISPATCH_DY = 1
    GEMM1 = 2
    GEMM2 = 3
    DGRAD2 = 4
    DGRAD1 = 5
    WGRAD2 = 6
    WGRAD13 = 7
    ZERO = 8
    SIGNAL_DONE = 9
    REDUCE = 10


class RingBuffer(enum.IntEnum):
    X = 0
    GATE_UP = 1
    ACTIVATION = 2
    DY = 3
    D_GATE_UP = 4
    SAVED_X = 5
    SAVED_GATE_UP = 6


class AccessMode(enum.IntFlag):
    READ = 1
    WRITE = 2
    RELEASE = 4


class PeerWait(enum.IntEnum):
    NONE = 0
    ENTERED = 1
    DONE = 2


class RouteFaultKind(enum.IntEnum):
    NONE = 0
    OUT_OF_RANGE = 1
    DUPLICATE = 2


@dataclasses.dataclass(frozen=True)
class TileSizes:
    """Tile shapes of the task stream, in rows, columns or tokens, and its lag in minibatches (csrc/task/tiles.h)."""

    block_rows: int
    dispatch_rows: int
    gate_up_cols: int
    hidden_cols: int
    activation_grad_cols: int
    wgrad_rows: int
    wgrad_cols: int
    reduce_tokens: int
    lag: int


@dataclasses.dataclass(frozen=True)
class PassShape:
    """What the task stream of a pass depends on besides the rows per expert. Blocks are of 128 rows."""

    pass_kind: Pass
    rank: int
    ep_size: int
    num_tokens: int
    hidden: int
    intermediate: int
    num_local_experts: int
    minibatch_blocks: int
    macrobatch_blocks: int
    capacity_blocks: int

    def values(self) -> list[int]:
        return [int(value) for value in dataclasses.astuple(self)]


@dataclasses.dataclass(frozen=True)
class CounterWait:
    """Every counter in [first, first + count) must have reached target."""

    first: int
    count: int
    target: int


@dataclasses.dataclass(frozen=True)
class RingAccess:
    buffer: RingBuffer
    mode: AccessMode
    first_block: int
    num_blocks: int


@dataclasses.dataclass(frozen=True)
class Task:
    """One task of a pass; fields as in csrc/task/task.h."""

    kind: TaskKind
    stream: Stream
    peer_wait: PeerWait
    order: int
    macrobatch: int
    minibatch: int
    block: int
    ring_block: int
    first_row: int
    num_rows: int
    expert: int
    tile_m: int
    tile_n: int
    first_block: int
    num_blocks: int
    continues: bool
    continued: bool
    waits: tuple[CounterWait, ...]
    bumps: tuple[int, ...]
    accesses: tuple[RingAccess, ...]


@dataclasses.dataclass(frozen=True)
class TaskStream:
    """All tasks of one ticket sequence in ticket order, and the sizes of the plan."""

    tasks: tuple[Task, ...]
    compute_tickets: int
    comm_tickets: int
    num_counters: int
    transfers: int


_HEAD_COLUMNS = 17
_MAX_WAITS = 4
_MAX_BUMPS = 2
_MAX_ACCESSES = 4
TASK_COLUMNS = _HEAD_COLUMNS + 1 + 3 * _MAX_WAITS + 1 + _MAX_BUMPS + 1 + 4 * _MAX_ACCESSES


def _decode_task(row: list[int]) -> Task:
    at = _HEAD_COLUMNS
    num_waits = row[at]
    waits = tuple(CounterWait(*row[at + 1 + 3 * i : at + 4 + 3 * i]) for i in range(num_waits))
    at += 1 + 3 * _MAX_WAITS
    bumps = tuple(row[at + 1 : at + 1 + row[at]])
    at += 1 + _MAX_BUMPS
    accesses = []
    for i in range(row[at]):
        buffer, mode, first, count = row[at + 1 + 4 * i : at + 5 + 4 * i]
        accesses.append(RingAccess(RingBuffer(buffer), AccessMode(mode), first, count))
    return Task(
        TaskKind(row[0]),
        Stream(row[1]),
        PeerWait(row[2]),
        *row[3:15],
        continues=bool(row[15]),
        continued=bool(row[16]),
        waits=waits,
        bumps=bumps,
        accesses=tuple(accesses),
    )


def tile_sizes() -> TileSizes:
    """The tile shapes that the library was compiled with."""
    return TileSizes(*_OPS.tile_sizes(torch.empty(0, device="cpu")).tolist())


def row_offset(row: int, row_elements: int) -> int:
    """Element offset of a row, in 64 bits, by the function that the kernels use."""
    return int(_OPS.row_offset(row, row_elements, torch.empty(0, device="cpu")))


def find_route_fault(topk_experts: torch.Tensor, num_experts: int) -> tuple[RouteFaultKind, int, int, int]:
    """First bad id of int32 [T, K]: (kind, token, slot, expert id). -1 is a missing route; ids must be in [0, E) and distinct in a row."""
    kind, token, slot, expert = _OPS.find_route_fault(topk_experts, num_experts).tolist()
    return RouteFaultKind(kind), token, slot, expert


def route_schedule(
    topk_experts: torch.Tensor, num_tokens: torch.Tensor, rank: int, num_local_experts: int, capacity_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Route schedule of one rank.

    Args:
        topk_experts: int32 [EP, T_max, K], every rank's global expert ids, -1 = no route.
        num_tokens: int64 [EP], how many rows of each rank count.
        rank: whose schedule; its experts are [rank * num_local_experts, (rank + 1) * num_local_experts).
        capacity_rows: rows of the tables, a multiple of 128.

    Returns:
        row_source_rank int32 [capacity_rows], row_source_slot int32 [capacity_rows] (token * K + slot; both -1 on padding),
        expert_rows int32 [E_local] unpadded, expert_row_offsets int64 [E_local + 1] padded, num_rows int64 [1], the rows needed. When these
        exceed the capacity, the first two are not written.
    """
    return _OPS.route_schedule(topk_experts, num_tokens, rank, num_local_experts, capacity_rows)


def task_table(expert_row_offsets: torch.Tensor, shape: PassShape, stream: Stream) -> tuple[torch.Tensor, torch.Tensor]:
    """Tasks of one ticket sequence as int64 [tasks, TASK_COLUMNS], and int64 [4]: compute tickets, comm tickets, counters, transfers."""
    return _OPS.task_stream(expert_row_offsets, shape.values(), int(stream))


def task_stream(expert_row_offsets: torch.Tensor, shape: PassShape, stream: Stream) -> TaskStream:
    """`task_table`, decoded."""
    table, totals = task_table(expert_row_offsets, shape, stream)
    return TaskStream(tuple(_decode_task(row) for row in table.tolist()), *totals.tolist())


def store_flag(flags: torch.Tensor, index: int, value: int) -> None:
    """Store a flag of int64 shared memory, after all earlier writes (release)."""
    _OPS.store_flag(flags, index, value)


def load_flag(flags: torch.Tensor, index: int) -> int:
    """Load a flag of int64 shared memory, before all later reads (acquire)."""
    return _OPS.load_flag(flags, index)


@torch.library.register_fake("mok_megatron::find_route_fault")
def _(topk_experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    return topk_experts.new_empty(4, dtype=torch.int64)


@torch.library.register_fake("mok_megatron::route_schedule")
def _(
    topk_experts: torch.Tensor, num_tokens: torch.Tensor, rank: int, num_local_experts: int, capacity_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        topk_experts.new_empty(capacity_rows),
        topk_experts.new_empty(capacity_rows),
        topk_experts.new_empty(num_local_experts),
        topk_experts.new_empty(num_local_experts + 1, dtype=torch.int64),
        topk_experts.new_empty(1, dtype=torch.int64),
    )


@torch.library.register_fake("mok_megatron::task_stream")
def _(expert_row_offsets: torch.Tensor, shape: list[int], stream: int) -> tuple[torch.Tensor, torch.Tensor]:
    tasks = torch.library.get_ctx().new_dynamic_size()
    return expert_row_offsets.new_empty(tasks, TASK_COLUMNS), expert_row_offsets.new_empty(4)


@torch.library.register_fake("mok_megatron::tile_sizes")
def _(like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(len(dataclasses.fields(TileSizes)), dtype=torch.int64)


@torch.library.register_fake("mok_megatron::row_offset")
def _(row: int, row_elements: int, like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(1, dtype=torch.int64)


@torch.library.register_fake("mok_megatron::store_flag")
def _(flags: torch.Tensor, index: int, value: int) -> None:
    return None
