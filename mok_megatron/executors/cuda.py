"""CUDA executor: launches the schedule kernels and the megakernels of forward, recompute and backward over a rank's buffers.

Kernels are reached through the library's C interface (csrc/kernels/launch.h). A call's arguments are one block of 64-bit words that is filled
once a workspace; a call writes the few words that change. Nothing here waits for the GPU.
"""

import array
import ctypes
import dataclasses
import functools
import struct
from collections.abc import Callable, Sequence

import torch

from mok_megatron.build import LIBRARY, build_info, check_device_architecture, load_library
from mok_megatron.config import BLOCK_ROWS, MAX_EP_SIZE, MAX_LOCAL_EXPERTS
from mok_megatron.errors import MoKArgumentError, MoKBuildError, MoKError
from mok_megatron.executors.cuda_backward import ALIGNMENT, BACKWARD_FIELDS, BackwardMemory, matrix_addresses
from mok_megatron.schedule import MoKContext, MoKSchedule, PackedSchedule, ScheduleLayout

_TENSOR_MAP_BYTES = 128
_STATE_WORDS = 8
# Code of a launch: a matrix of w13, from 1000 on of w2, does not lie on 16 bytes (csrc/kernels/launch.h).
_MISALIGNED = 100_000
FAULT_WORDS = 16

_PEER_FIELDS = ("x", "router_weights", "combine", "flags", "routes", "num_tokens", "dy", "d_router_weights")
# What the passes read of a schedule, in the order of MoKSchedule.addresses().
_SCHEDULE_TABLES = ("row_source_rank", "row_source_slot", "expert_rows", "expert_row_offsets", "topk_experts")
_FORWARD_FIELDS = (
    "rank",
    "ep_size",
    "num_tokens",
    "topk",
    "hidden",
    "intermediate",
    "num_local_experts",
    "minibatch_blocks",
    "macrobatch_blocks",
    "capacity_blocks",
    "num_comm_sms",
    "sm_reserve",
    "timeout_nanoseconds",
    "row_source_rank",
    "row_source_slot",
    "expert_rows",
    "expert_row_offsets",
    "topk_experts",
    "x",
    "router_weights",
    "y",
    "x_rows",
    "gate_up",
    "ring_weights",
    "ring_activation",
    "weight_maps",
    "counters",
    "records",
    "state",
    "fault",
)
_SCHEDULE_FIELDS = (
    "rank",
    "ep_size",
    "num_tokens",
    "max_tokens",
    "topk",
    "num_local_experts",
    "capacity_rows",
    "timeout_nanoseconds",
    "topk_experts",
    "wide_ids",
    "row_source_rank",
    "row_source_slot",
    "expert_rows",
    "expert_row_offsets",
    "num_rows",
    "own_routes",
    "scratch",
    "state",
    "fault",
)


@functools.cache
def kernel_library() -> ctypes.CDLL:
    """The C interface of the compiled library.

    Raises:
        MoKBuildError: the library is missing, was built without kernels, or its structures are not those of this file.
    """
    load_library()
    if build_info()["cuda"] is None:
        raise MoKBuildError("mok_megatron was built without kernels (no nvcc, or MOK_CUDA=0): build it where nvcc is")
    return bind(ctypes.CDLL(str(LIBRARY)))


def bind(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the functions and compare the sizes of their argument blocks."""
    for name in ("mok_sm90_forward", "mok_sm90_recompute", "mok_sm90_backward", "mok_sm90_schedule"):
        function = getattr(library, name)
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_int
    library.mok_sm90_load.argtypes, library.mok_sm90_load.restype = [], ctypes.c_int
    for name, count in (("mok_sm90_compact_routes", 8), ("mok_sm90_spread_gradients", 7)):
        function = getattr(library, name)
        function.argtypes, function.restype = [*[ctypes.c_int64] * count, ctypes.c_void_p], ctypes.c_int
    for name, count in (
        ("mok_sm90_schedule_scratch_words", 4),
        ("mok_num_counters", 2),
        ("mok_forward_record_bytes", 4),
        ("mok_backward_record_bytes", 6),
        ("mok_backward_scratch_bytes", 2),
    ):
        function = getattr(library, name)
        function.argtypes, function.restype = [ctypes.c_int64] * count, ctypes.c_int64
    for name, fields, extra in (
        ("mok_forward_call_bytes", _FORWARD_FIELDS, 2 * MAX_LOCAL_EXPERTS),
        ("mok_backward_call_bytes", BACKWARD_FIELDS, 4 * MAX_LOCAL_EXPERTS),
        ("mok_schedule_call_bytes", _SCHEDULE_FIELDS, 0),
    ):
        function = getattr(library, name)
        function.argtypes, function.restype = [], ctypes.c_int64
        expected = 8 * (len(_PEER_FIELDS) * MAX_EP_SIZE + len(fields) + extra)
        if function() != expected:
            raise MoKBuildError(f"{name}() is {function()}, this package expects {expected}: the library is of another version")
    return library


def launch(function: Callable[..., int], device: torch.device, *words: int) -> int:
    """What a function of the library returns that launches with these words on the device's current stream."""
    index = device.index
    if torch._C._cuda_getDevice() == index:
        # Not torch.cuda.current_stream(): the object that it makes costs several times the launch's own words.
        return function(*words, torch._C._cuda_getCurrentRawStream(index))
    # The runtime launches on the thread's current device.
    with torch.cuda.device(device):
        return function(*words, torch._C._cuda_getCurrentRawStream(index))


class CallBlock:
    """The argument block of one kernel call: 64-bit words with names. Attributes: address."""

    def __init__(self, fields: Sequence[str], tables: int, peers: Sequence[Sequence[int]], entries: int = 0) -> None:
        base = len(_PEER_FIELDS) * MAX_EP_SIZE
        self._fields = tuple(fields)
        self._at = {name: base + i for i, name in enumerate(fields)}
        # Never resized: the address stays.
        self._words = array.array("q", bytes(8 * (base + len(fields) + tables * MAX_LOCAL_EXPERTS)))
        self.address = self._words.buffer_info()[0]
        # Write `entries` words of a table behind the named words (w13: 0, w2: 1; gradients of w13: 2, of w2: 3).
        self.tables = [self._writer(base + len(fields) + index * MAX_LOCAL_EXPERTS, entries) for index in range(tables)]
        for rank, pointers in enumerate(peers):
            for field, pointer in enumerate(pointers):
                self._words[field * MAX_EP_SIZE + rank] = pointer

    def _writer(self, first: int, count: int) -> Callable[..., None]:
        return functools.partial(struct.Struct(f"{count}q").pack_into, self._words, 8 * first)

    def writer(self, *names: str) -> Callable[..., None]:
        """What writes the words of these names, in this order, at once. They must lie side by side."""
        first = self._fields.index(names[0])
        if self._fields[first : first + len(names)] != names:
            raise ValueError(f"{names}: must lie side by side in {self._fields}")
        return self._writer(self._at[names[0]], len(names))

    def set(self, **values: int) -> None:
        for name, value in values.items():
            self._words[self._at[name]] = value


@dataclasses.dataclass
class RankMemory:
    """Device memory of one rank that its peers map, as tensors or as this rank's views of a peer's.

    x: bf16 [T_max, H]; router_weights: fp32 [T_max, K]; combine: bf16 [T_max * K, H]; flags: int64 [EP, words]; routes: int32 [2, T_max, K];
    num_tokens: int64 [2]; dy: bf16 [T_max, H]; d_router_weights: fp32 [T_max * K].
    """

    x: torch.Tensor
    router_weights: torch.Tensor
    combine: torch.Tensor
    flags: torch.Tensor
    routes: torch.Tensor
    num_tokens: torch.Tensor
    dy: torch.Tensor
    d_router_weights: torch.Tensor

    def pointers(self) -> list[int]:
        return [getattr(self, name).data_ptr() for name in _PEER_FIELDS]


@dataclasses.dataclass(frozen=True)
class ExecutorShape:
    """Sizes of an executor: all that its buffers and task stream depend on. Sizes of batches and capacity are in rows, multiples of 128."""

    rank: int
    ep_size: int
    num_local_tokens: int
    topk: int
    hidden_size: int
    intermediate_size: int
    num_local_experts: int
    minibatch_size: int
    macrobatch_size: int
    capacity_rows: int


class CudaExecutor:
    """One rank's kernels over its buffers. Calls are asynchronous, on the current stream; all ranks make the same calls in the same order.

    Args:
        shape: sizes.
        memory: RankMemory of every rank. Flags must be zero when the group starts.
        ring_x: bf16 [macrobatch_size, H], used when no context is kept.
        ring_activation: bf16 [macrobatch_size, I]. ring_weights: fp32 [macrobatch_size].
        library: the C interface; the package's own by default.
    """

    def __init__(
        self,
        shape: ExecutorShape,
        memory: Sequence[RankMemory],
        ring_x: torch.Tensor,
        ring_activation: torch.Tensor,
        ring_weights: torch.Tensor,
        library: ctypes.CDLL | None = None,
    ) -> None:
        self.shape, self.memory, self.ring_x = shape, memory, ring_x
        self.device = ring_x.device
        if library is None:
            check_device_architecture(build_info(), torch.cuda.get_device_capability(self.device))
        self._library = library or kernel_library()
        with torch.cuda.device(self.device):
            code = self._library.mok_sm90_load()
        if code != 0:
            raise MoKError(f"the kernels cannot be loaded on {self.device}: CUDA error {code}")
        self.num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        blocks = shape.capacity_rows // BLOCK_ROWS
        experts = shape.num_local_experts

        def zeros(count: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=self.device)

        self._state = zeros(_STATE_WORDS, torch.int64)
        self._counters = zeros(self._library.mok_num_counters(blocks, experts), torch.int32)
        self._weight_maps = zeros(2 * experts * _TENSOR_MAP_BYTES, torch.uint8)
        self._records = zeros(
            self._library.mok_forward_record_bytes(blocks, shape.num_local_tokens, shape.hidden_size, shape.intermediate_size),
            torch.uint8,
        )
        scratch_words = self._library.mok_sm90_schedule_scratch_words(shape.ep_size, shape.num_local_tokens, shape.topk, experts)
        self._scratch = zeros(max(scratch_words, 1), torch.int32)
        # The host reads it without a word to the GPU, also while a stream is stuck.
        self.fault = torch.zeros(FAULT_WORDS, dtype=torch.int64, pin_memory=True)
        self._fault_code = ctypes.c_int64.from_address(self.fault.data_ptr())
        self._rings = (ring_activation, ring_weights)
        self._peers = peers = [rank.pointers() for rank in memory]
        self._layout = ScheduleLayout(shape.capacity_rows, experts, shape.topk)
        common = {"rank": shape.rank, "ep_size": shape.ep_size, "topk": shape.topk, "num_local_experts": experts}
        shared = {"state": self._state.data_ptr(), "fault": self.fault.data_ptr()}
        self._backward_memory: BackwardMemory | None = None
        self._forward = CallBlock(_FORWARD_FIELDS, 2, peers, experts)
        self._forward.set(
            **common,
            **shared,
            hidden=shape.hidden_size,
            intermediate=shape.intermediate_size,
            minibatch_blocks=shape.minibatch_size // BLOCK_ROWS,
            macrobatch_blocks=shape.macrobatch_size // BLOCK_ROWS,
            capacity_blocks=blocks,
            ring_activation=ring_activation.data_ptr(),
            ring_weights=ring_weights.data_ptr(),
            weight_maps=self._weight_maps.data_ptr(),
            counters=self._counters.data_ptr(),
            records=self._records.data_ptr(),
        )
        self._write_forward = self._forward.writer(
            "num_comm_sms", "sm_reserve", "timeout_nanoseconds", *_SCHEDULE_TABLES, "x", "router_weights", "y", "x_rows", "gate_up"
        )
        self._write_forward_tokens = self._forward.writer("num_tokens")
        self._schedule = CallBlock(_SCHEDULE_FIELDS, 0, peers)
        self._schedule.set(
            **common,
            **shared,
            max_tokens=shape.num_local_tokens,
            capacity_rows=shape.capacity_rows,
            scratch=self._scratch.data_ptr(),
        )
        self._write_schedule = self._schedule.writer(
            "timeout_nanoseconds",
            "topk_experts",
            "wide_ids",
            "row_source_rank",
            "row_source_slot",
            "expert_rows",
            "expert_row_offsets",
            "num_rows",
            "own_routes",
        )
        self._write_schedule_tokens = self._schedule.writer("num_tokens")

    def fault_code(self) -> int:
        """The code of the kernels' fault record, 0 without a fault. Costs no look at the GPU."""
        return self._fault_code.value

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of this rank that no peer maps, by purpose."""
        activation, weights = self._rings
        return {
            "ring.x": self.ring_x.nbytes,
            "ring.activation": activation.nbytes,
            "ring.router_weights": weights.nbytes,
            "counters": self._counters.nbytes,
            "scratch": self._scratch.nbytes + self._weight_maps.nbytes + self._state.nbytes,
            **({} if self._backward_memory is None else self._backward_memory.memory_bytes()),
        }

    def _launch(self, function: Callable[[int, int], int], block: CallBlock) -> None:
        code = launch(function, self.device, block.address)
        if code >= _MISALIGNED:
            matrix, index = divmod(code - _MISALIGNED, 1000)
            raise MoKArgumentError(f"{('w13', 'w2')[matrix]}[{index}]: address must be a multiple of {ALIGNMENT}")
        if code != 0:
            raise MoKError(f"{function.__name__} failed with CUDA error {code}")

    def build_schedule(self, topk_experts: torch.Tensor, timeout_seconds: float) -> MoKSchedule:
        """Schedule of int32 or int64 [T, K] contiguous expert ids; bad ids and overflow are reported through `fault`."""
        tokens, topk = topk_experts.shape
        layout = self._layout
        memory = torch.empty(layout.words + tokens * topk, dtype=torch.int32, device=self.device)
        self._write_schedule_tokens(tokens)
        self._write_schedule(
            int(timeout_seconds * 1e9), topk_experts.data_ptr(), topk_experts.dtype is torch.int64, *layout.addresses(memory.data_ptr())
        )
        self._launch(self._library.mok_sm90_schedule, self._schedule)
        return PackedSchedule(layout, tokens, memory)

    def forward(
        self,
        schedule: MoKSchedule,
        x: torch.Tensor,
        router_weights: torch.Tensor,
        w13: torch.Tensor | Sequence[torch.Tensor],
        w2: torch.Tensor | Sequence[torch.Tensor],
        *,
        context: MoKContext | None,
        timeout_seconds: float,
        num_comm_sms: int = 0,
        sm_reserve: int = 0,
    ) -> torch.Tensor:
        """y [T, H] of contiguous bf16 x [T, H], fp32 router_weights [T, K]; weights contiguous per expert. Fills `context` where given."""
        y = torch.empty_like(x)
        block = self._forward
        self._write_forward_tokens(schedule.num_tokens)
        self._write_forward(
            num_comm_sms,
            sm_reserve,
            int(timeout_seconds * 1e9),
            *schedule.addresses(),
            x.data_ptr(),
            router_weights.data_ptr(),
            y.data_ptr(),
            (self.ring_x if context is None else context.x_rows).data_ptr(),
            0 if context is None else context.gate_up.data_ptr(),
        )
        block.tables[0](*matrix_addresses(w13))
        block.tables[1](*matrix_addresses(w2))
        self._launch(self._library.mok_sm90_forward, block)
        return y

    @functools.cached_property
    def _backward(self) -> CallBlock:
        """Argument block of backward and recompute; its memory is made with it."""
        shape = self.shape
        memory = self._backward_memory = BackwardMemory(
            self._library,
            self.device,
            rows=shape.macrobatch_size,
            capacity_rows=shape.capacity_rows,
            num_local_tokens=shape.num_local_tokens,
            hidden=shape.hidden_size,
            inner=shape.intermediate_size,
            experts=shape.num_local_experts,
        )
        activation, weights = self._rings
        block = CallBlock(BACKWARD_FIELDS, 4, self._peers, shape.num_local_experts)
        block.set(
            rank=shape.rank,
            ep_size=shape.ep_size,
            topk=shape.topk,
            hidden=shape.hidden_size,
            intermediate=shape.intermediate_size,
            num_local_experts=shape.num_local_experts,
            minibatch_blocks=shape.minibatch_size // BLOCK_ROWS,
            macrobatch_blocks=shape.macrobatch_size // BLOCK_ROWS,
            capacity_blocks=shape.capacity_rows // BLOCK_ROWS,
            ring_x=self.ring_x.data_ptr(),
            ring_activation=activation.data_ptr(),
            ring_weights=weights.data_ptr(),
            counters=self._counters.data_ptr(),
            state=self._state.data_ptr(),
            fault=self.fault.data_ptr(),
            **memory.pointers(),
        )
        return block

    @functools.cached_property
    def _write_backward(self) -> Callable[..., None]:
        return self._backward.writer(
            "sm_reserve",
            "timeout_nanoseconds",
            *_SCHEDULE_TABLES,
            "x",
            "dy",
            "router_weights",
            "dx",
            "d_router_weights",
            "x_rows",
            "gate_up",
        )

    def _set_backward(
        self,
        schedule: MoKSchedule,
        context: MoKContext,
        x: torch.Tensor,
        router_weights: torch.Tensor,
        timeout_seconds: float,
        sm_reserve: int,
        dy: int = 0,
        dx: int = 0,
        d_router_weights: int = 0,
    ) -> CallBlock:
        block = self._backward
        block.set(num_tokens=schedule.num_tokens)
        self._write_backward(
            sm_reserve,
            int(timeout_seconds * 1e9),
            *schedule.addresses(),
            x.data_ptr(),
            dy,
            router_weights.data_ptr(),
            dx,
            d_router_weights,
            context.x_rows.data_ptr(),
            context.gate_up.data_ptr(),
        )
        return block

    def recompute(
        self,
        schedule: MoKSchedule,
        x: torch.Tensor,
        router_weights: torch.Tensor,
        w13: torch.Tensor | Sequence[torch.Tensor],
        *,
        context: MoKContext,
        timeout_seconds: float,
        sm_reserve: int = 0,
    ) -> None:
        """Fills `context` as `forward` does, bit for bit. Operands as there."""
        block = self._set_backward(schedule, context, x, router_weights, timeout_seconds, sm_reserve)
        addresses = matrix_addresses(w13)
        block.tables[0](*addresses)
        # The map of w2 is made, and never read.
        block.tables[1](*addresses)
        self._launch(self._library.mok_sm90_recompute, block)

    def backward(
        self,
        schedule: MoKSchedule,
        context: MoKContext,
        dy: torch.Tensor,
        x: torch.Tensor,
        router_weights: torch.Tensor,
        w13: torch.Tensor | Sequence[torch.Tensor],
        w2: torch.Tensor | Sequence[torch.Tensor],
        words13: Sequence[int],
        words2: Sequence[int],
        *,
        timeout_seconds: float,
        sm_reserve: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """dx bf16 [T, H] and d_router_weights fp32 [T, K]. Operands as in `forward`; the weight gradients go where `words13` and `words2` say,
        one word an expert as `grad_words` gives them.
        """
        dx, d_router_weights = torch.empty_like(x), torch.empty_like(router_weights)
        block = self._set_backward(
            schedule, context, x, router_weights, timeout_seconds, sm_reserve, dy.data_ptr(), dx.data_ptr(), d_router_weights.data_ptr()
        )
        for write, table in zip(block.tables, (matrix_addresses(w13), matrix_addresses(w2), words13, words2), strict=True):
            write(*table)
        self._launch(self._library.mok_sm90_backward, block)
        return dx, d_router_weights
