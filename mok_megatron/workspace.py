"""Buffers that the ranks of a group share: symmetric memory, flags and rings. One per (group, shapes), shared by all layers.

On the CPU the symmetric buffers are POSIX shared memory that the peers map, so that a pull or a push is a plain memory operation, as over
NVLink.
"""

import atexit
import dataclasses
import datetime
import math
import mmap
import os
import socket
import time
import uuid
from typing import Any

import torch
import torch.distributed as dist

from mok_megatron.config import BLOCK_ROWS, CHANNEL_MULTIPLE, MAX_EP_SIZE, MAX_LOCAL_EXPERTS, MAX_TOPK, MoKConfig
from mok_megatron.errors import MoKArgumentError, MoKError, MoKTimeoutError, MoKUnsupportedError
from mok_megatron.protocol import (
    ROW_WORDS,
    STATUS_RECORDS,
    TEXT_BYTES,
    CallKind,
    CallState,
    Flag,
    FlagMemory,
    FlagWait,
    GroupProtocol,
    PassTag,
    StatusCode,
    poll,
)

# The ring's margin over num_local_tokens * K, as a fraction.
_RING_MARGIN = 0.25
_ALIGNMENT = 256


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class WorkspaceShape:
    """Everything that the sizes of a workspace depend on; equal on all ranks of the group.

    Raises:
        MoKArgumentError: a size breaks its rule.
    """

    ep_size: int
    num_local_tokens: int
    hidden_size: int
    topk: int
    num_local_experts: int
    intermediate_size: int
    dtype: torch.dtype
    minibatch_size: int | None = None
    macrobatch_size: int | None = None
    schedule_capacity_multiplier: float = 1.0

    def __post_init__(self) -> None:
        sizes = {
            "num_local_tokens": (self.num_local_tokens, 0, None, 1),
            "hidden_size": (self.hidden_size, CHANNEL_MULTIPLE, None, CHANNEL_MULTIPLE),
            "topk": (self.topk, 1, MAX_TOPK, 1),
            "num_local_experts": (self.num_local_experts, 1, MAX_LOCAL_EXPERTS, 1),
            "intermediate_size": (self.intermediate_size, CHANNEL_MULTIPLE, None, CHANNEL_MULTIPLE),
            "expert-parallel size": (self.ep_size, 1, MAX_EP_SIZE, 1),
        }
        for name, (value, low, high, multiple) in sizes.items():
            if isinstance(value, bool) or not isinstance(value, int):
                raise MoKArgumentError(f"{name}={value!r}: must be an integer")
            if value < low or (high is not None and value > high) or value % multiple:
                bound = f"at least {low}" if high is None else f"in [{low}, {high}]"
                rule = f"must be {bound}" + (f" and a multiple of {multiple}" if multiple > 1 else "")
                raise MoKArgumentError(f"{name}={value}: {rule}")
        if self.dtype not in (torch.bfloat16, torch.float32):
            raise MoKArgumentError(f"dtype={self.dtype}: must be torch.bfloat16 or torch.float32")
        if self.num_local_tokens * self.topk > 2**31 - 1:
            raise MoKArgumentError(
                f"num_local_tokens={self.num_local_tokens}: times topk={self.topk} must be below 2^31 (row slots are 32-bit)"
            )
        if self.topk > self.num_local_experts * self.ep_size:
            raise MoKArgumentError(
                f"topk={self.topk}: must not exceed the number of experts, {self.num_local_experts * self.ep_size}"
            )

    @property
    def num_experts(self) -> int:
        return self.num_local_experts * self.ep_size

    @property
    def capacity_rows(self) -> int:
        """Rows of the schedule's tables: the share of all routes that is allowed, and the padding of every expert on top."""
        routes = math.ceil(self.schedule_capacity_multiplier * self.ep_size * self.num_local_tokens * self.topk)
        return _round_up(routes, BLOCK_ROWS) + self.num_local_experts * BLOCK_ROWS

    def ring(self, num_sms: int) -> tuple[int, int]:
        """Rows of a minibatch and of the ring, (minibatch_size, macrobatch_size).

        Two waves of 128 x 256 tiles of the narrower GEMM: rows >= 2 * SMs * 128 * 256 / min(2I, H).
        """
        narrow = min(2 * self.intermediate_size, self.hidden_size)
        minibatch = self.minibatch_size or _round_up(math.ceil(2 * num_sms * 128 * 256 / narrow), BLOCK_ROWS)
        if self.macrobatch_size is not None:
            if self.minibatch_size is None:
                minibatch = max(
                    rows
                    for rows in range(BLOCK_ROWS, min(minibatch, self.macrobatch_size) + 1, BLOCK_ROWS)
                    if self.macrobatch_size % rows == 0
                )
            return minibatch, self.macrobatch_size
        routes = math.ceil(self.num_local_tokens * self.topk * (1 + _RING_MARGIN))
        rows = _round_up(routes, BLOCK_ROWS) + self.num_local_experts * BLOCK_ROWS
        rows = min(rows, self.capacity_rows)
        if self.minibatch_size is None:
            minibatch = min(minibatch, rows)
        return minibatch, _round_up(rows, minibatch)


@dataclasses.dataclass
class SymmetricBuffers:
    """What a rank shares with its peers. They read all of it, and write combine, d_router_weights and flags.

    x, dy: [T_max, H]; router_weights: fp32 [T_max, K]; combine: [T_max * K, H], routed outputs or input gradients by slot;
    d_router_weights: fp32 [T_max * K]; topk_experts: int32 [2, T_max, K] and num_tokens: int64 [2], double-buffered by call parity because a
    slow peer may still read the last one.
    """

    x: torch.Tensor
    dy: torch.Tensor
    router_weights: torch.Tensor
    combine: torch.Tensor
    d_router_weights: torch.Tensor
    topk_experts: torch.Tensor
    num_tokens: torch.Tensor
    flags: FlagMemory

    @staticmethod
    def layout(shape: WorkspaceShape) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        tokens, topk = shape.num_local_tokens, shape.topk
        return {
            "words": ((shape.ep_size, ROW_WORDS), torch.int64),
            "num_tokens": ((2,), torch.int64),
            "texts": ((shape.ep_size, STATUS_RECORDS, TEXT_BYTES), torch.uint8),
            "topk_experts": ((2, tokens, topk), torch.int32),
            "x": ((tokens, shape.hidden_size), shape.dtype),
            "dy": ((tokens, shape.hidden_size), shape.dtype),
            "router_weights": ((tokens, topk), torch.float32),
            "combine": ((tokens * topk, shape.hidden_size), shape.dtype),
            "d_router_weights": ((tokens * topk,), torch.float32),
        }

    @classmethod
    def num_bytes(cls, shape: WorkspaceShape) -> int:
        return sum(
            _round_up(math.prod(sizes) * dtype.itemsize, _ALIGNMENT) for sizes, dtype in cls.layout(shape).values()
        )

    @classmethod
    def from_memory(cls, shape: WorkspaceShape, memory: torch.Tensor) -> "SymmetricBuffers":
        """Views of uint8 memory of num_bytes(shape) bytes."""
        views, at = {}, 0
        for name, (sizes, dtype) in cls.layout(shape).items():
            size = math.prod(sizes) * dtype.itemsize
            views[name] = memory[at : at + size].view(dtype).view(sizes)
            at += _round_up(size, _ALIGNMENT)
        flags = FlagMemory(views.pop("words"), views.pop("texts"))
        return cls(flags=flags, **views)


@dataclasses.dataclass
class Rings:
    """Per-rank scratch rows that macrobatches take turns in, [macrobatch_size, ...].

    x, gate_up: forward without context, and the backward's replay; activation: h = silu(gate) * up * p; dy; d_gate_up;
    router_weights: fp32 [rows]; d_router_weights: fp32 [rows, tiles], partial sums per 128 columns of I; wgrad13, wgrad2: fp32 weight-sized
    sums of the expert that straddles two macrobatches.
    """

    x: torch.Tensor
    gate_up: torch.Tensor
    activation: torch.Tensor
    dy: torch.Tensor
    d_gate_up: torch.Tensor
    router_weights: torch.Tensor
    d_router_weights: torch.Tensor
    wgrad13: torch.Tensor
    wgrad2: torch.Tensor

    @classmethod
    def allocate(cls, shape: WorkspaceShape, macrobatch_size: int, device: torch.device) -> "Rings":
        rows, hidden, inner = macrobatch_size, shape.hidden_size, shape.intermediate_size
        straddles = shape.capacity_rows > rows

        def rows_of(width: int) -> torch.Tensor:
            return torch.empty(rows, width, dtype=shape.dtype, device=device)

        def fp32(*sizes: int) -> torch.Tensor:
            return torch.empty(*sizes, dtype=torch.float32, device=device)

        return cls(
            x=rows_of(hidden),
            gate_up=rows_of(2 * inner),
            activation=rows_of(inner),
            dy=rows_of(hidden),
            d_gate_up=rows_of(2 * inner),
            router_weights=fp32(rows),
            d_router_weights=fp32(rows, -(-inner // 128)),
            wgrad13=fp32(2 * inner, hidden) if straddles else fp32(0),
            wgrad2=fp32(hidden, inner) if straddles else fp32(0),
        )


class MoKWorkspace:
    """One rank's side of a group's buffers. Made by `get_workspace`.

    Attributes: shape (WorkspaceShape), rank, device, buffers (SymmetricBuffers of every rank), rings, protocol, minibatch_size and
    macrobatch_size as resolved, failure (the fatal error after which nothing works any more, or None).
    """

    def __init__(
        self,
        shape: WorkspaceShape,
        rank: int,
        buffers: list[SymmetricBuffers],
        *,
        device: torch.device,
        group: Any = None,
        num_sms: int = 1,
        timeout_seconds: float = MoKConfig.timeout_seconds,
    ) -> None:
        self.shape = shape
        self.rank = rank
        self.group = group
        self.device = device
        self.buffers = buffers
        self.timeout_seconds = timeout_seconds
        self.minibatch_size, self.macrobatch_size = shape.ring(num_sms)
        self.rings = Rings.allocate(shape, self.macrobatch_size, device)
        self.protocol = GroupProtocol(rank, [b.flags for b in buffers], torch.zeros(1, dtype=torch.int64))
        self.failure: MoKError | None = None
        self.failure_raised = False
        self.in_call = False

    ep_size = property(lambda self: self.shape.ep_size)
    num_local_tokens = property(lambda self: self.shape.num_local_tokens)
    hidden_size = property(lambda self: self.shape.hidden_size)
    topk = property(lambda self: self.shape.topk)
    num_local_experts = property(lambda self: self.shape.num_local_experts)
    intermediate_size = property(lambda self: self.shape.intermediate_size)
    dtype = property(lambda self: self.shape.dtype)
    capacity_rows = property(lambda self: self.shape.capacity_rows)

    @property
    def mine(self) -> SymmetricBuffers:
        return self.buffers[self.rank]

    def memory_bytes(self) -> dict[str, int]:
        """Bytes that this rank holds, by purpose."""
        rings = {f"ring.{f.name}": getattr(self.rings, f.name).nbytes for f in dataclasses.fields(Rings)}
        return {"symmetric": SymmetricBuffers.num_bytes(self.shape), **rings}

    def context_bytes(self) -> int:
        """Bytes that one call's context keeps for the backward: macrobatch_size * (H + 2I) elements."""
        return self.macrobatch_size * (self.hidden_size + 2 * self.intermediate_size) * self.dtype.itemsize

    def fail(self, error: MoKError) -> None:
        """Record a fatal error: no call works after it."""
        if self.failure is None:
            self.failure = error

    def check_usable(self) -> None:
        if self.failure is not None:
            self.failure_raised = True
            raise MoKError(f"this workspace cannot be used after: {self.failure}") from self.failure

    def close(self) -> None:
        """Let go of the buffers. Peers that still map them are not disturbed."""
        from mok_megatron import watchdog

        watchdog.unwatch(self)
        self.fail(MoKError("the workspace was closed"))
        self.buffers = []
        for key, workspace in list(_WORKSPACES.items()):
            if workspace is self:
                del _WORKSPACES[key]


_WORKSPACES: dict[tuple[Any, ...], MoKWorkspace] = {}


def _shared_memory(name: str, size: int, create: bool) -> torch.Tensor:
    """Map `size` bytes of POSIX shared memory as uint8."""
    path = os.path.join("/dev/shm", name)
    descriptor = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
    try:
        if create:
            try:
                # Reserve now: writing to pages that do not exist would end the process with SIGBUS.
                os.posix_fallocate(descriptor, 0, size)
            except OSError as error:
                os.unlink(path)
                raise MoKArgumentError(
                    f"num_local_tokens: the symmetric buffers need {size} bytes of shared memory (/dev/shm), which failed: {error}"
                ) from error
        return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def _all_gather(value: Any, group: Any, ep_size: int) -> list[Any]:
    gathered: list[Any] = [None] * ep_size
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def _meet(config: MoKConfig, group: Any, rank: int, request: str) -> None:
    """Make sure that every rank of the group is here before anything collective starts.

    A rank that asks for a new workspace while its peers found theirs in the cache would wait for them forever: where the group has a workspace
    already, the ranks meet in a call of it, and a peer that is in another call is an error on both sides.

    Raises:
        MoKArgumentError: the peers are elsewhere.
        MoKTimeoutError: a rank did not come within config.timeout_seconds.
    """
    timeout = config.timeout_seconds if isinstance(config, MoKConfig) else MoKConfig.timeout_seconds
    known = [workspace for workspace in _WORKSPACES.values() if workspace.group is group and workspace.failure is None]
    if known:
        protocol = known[0].protocol
        state = CallState(protocol, protocol.call, CallKind.RESIZE, PassTag(), timeout)
        protocol.signal_entered(state.call, state.kind, state.tag)
        try:
            poll(FlagWait(state, Flag.ENTERED, range(protocol.ep_size)), timeout)
        except MoKError as error:
            known[0].fail(error)
            known[0].failure_raised = True
            message = f"rank {rank} asks for a new workspace ({request}) but its peers do not: {error}"
            protocol.publish_status(state.call, StatusCode.FAILED, message)
            raise MoKArgumentError(message) from error
        protocol.advance()
    elif dist.get_backend(group) == "gloo":
        started = time.monotonic()
        try:
            dist.monitored_barrier(group, timeout=datetime.timedelta(seconds=timeout), wait_all_ranks=True)
        except RuntimeError as error:
            raise MoKTimeoutError(
                f"rank {rank} of {dist.get_world_size(group)}: making the workspace ({request}), not all ranks came within "
                f"{timeout:g} s: {error}",
                rank=rank,
                missing_ranks=(),
                layer=None,
                microbatch=None,
                phase="workspace",
                expected=1,
                arrived=(),
                waited_seconds=time.monotonic() - started,
                limit_seconds=timeout,
            ) from error


def _agree(
    shape: WorkspaceShape | None, fault: Exception | None, group: Any, ep_size: int, rank: int
) -> WorkspaceShape:
    """The shape that all ranks agree on, or the same error on all of them."""
    gathered = _all_gather((shape, None if fault is None else f"{fault}"), group, ep_size)
    faults = [f"rank {r}: {text}" for r, (_, text) in enumerate(gathered) if text is not None]
    if faults:
        raise MoKArgumentError("; ".join(faults)) from fault
    shapes = [s for s, _ in gathered]
    agreed = dataclasses.replace(shapes[0], num_local_tokens=max(s.num_local_tokens for s in shapes))
    for field in dataclasses.fields(WorkspaceShape):
        if field.name == "num_local_tokens":
            continue
        values = [getattr(s, field.name) for s in shapes]
        if any(value != values[0] for value in values):
            raise MoKArgumentError(f"{field.name}={values[rank]}: must be equal on all ranks of the group, is {values}")
    return agreed


def _map_buffers(shape: WorkspaceShape, group: Any, rank: int) -> list[SymmetricBuffers]:
    size = SymmetricBuffers.num_bytes(shape)
    if shape.ep_size == 1:
        memory = torch.zeros(size, dtype=torch.uint8)
        return [SymmetricBuffers.from_memory(shape, memory)]
    name, own, fault = f"mok_megatron_{uuid.uuid4().hex}", None, None
    try:
        own = _shared_memory(name, size, create=True)
    except (MoKError, OSError) as error:
        fault = str(error)
    gathered = _all_gather((socket.gethostname(), name, fault), group, shape.ep_size)
    try:
        faults = [f"rank {r}: {text}" for r, (_, _, text) in enumerate(gathered) if text is not None]
        if faults:
            raise MoKArgumentError("; ".join(faults))
        hosts = {host for host, _, _ in gathered}
        if len(hosts) > 1:
            raise MoKUnsupportedError(
                f"the expert-parallel group spans hosts {sorted(hosts)}: on the CPU its ranks must be processes of one host"
            )
        maps = [
            own if r == rank else _shared_memory(peer_name, size, create=False)
            for r, (_, peer_name, _) in enumerate(gathered)
        ]
        dist.barrier(group=group)
    finally:
        # Mapped everywhere or failed everywhere: the name is not needed any more, and no crash leaves it behind.
        if own is not None:
            os.unlink(os.path.join("/dev/shm", name))
    return [SymmetricBuffers.from_memory(shape, memory) for memory in maps]


def get_workspace(
    config: MoKConfig,
    group: Any,
    *,
    device: torch.device | str,
    num_local_tokens: int,
    hidden_size: int,
    topk: int,
    num_local_experts: int,
    intermediate_size: int,
    dtype: torch.dtype,
) -> MoKWorkspace:
    """The workspace of a group and shapes; made on first use, a collective call of the group, and shared afterwards.

    Args:
        config: knobs; minibatch, macrobatch and capacity shape the workspace.
        group: torch.distributed group of the EP ranks, or None for one rank without torch.distributed.
        device: where x lives.
        num_local_tokens: the most tokens this rank will ever bring; the group takes the largest of its ranks'.
        hidden_size, topk, num_local_experts, intermediate_size: H, K, E_local, I; equal on all ranks.
        dtype: torch.bfloat16 or torch.float32, of x and the weights.

    Raises:
        MoKArgumentError: on every rank, when one rank's argument breaks a rule or ranks differ.
        MoKUnsupportedError: the group spans hosts, or the device has no executor.
    """
    ep_size = 1 if group is None else dist.get_world_size(group)
    rank = 0 if group is None else dist.get_rank(group)
    device = torch.device(device)
    shape, fault = None, None
    try:
        if device.type != "cpu":
            raise MoKArgumentError(f"device={device}: must be cpu; this version has no executor for {device.type}")
        if not isinstance(config, MoKConfig):
            raise MoKArgumentError(f"config={config!r}: must be a MoKConfig")
        shape = WorkspaceShape(
            ep_size,
            num_local_tokens,
            hidden_size,
            topk,
            num_local_experts,
            intermediate_size,
            dtype,
            config.minibatch_size,
            config.macrobatch_size,
            config.schedule_capacity_multiplier,
        )
    except MoKArgumentError as error:
        if group is None:
            raise
        fault = error
    key = None if shape is None else (group, device, dataclasses.replace(shape, num_local_tokens=0))
    existing = _WORKSPACES.get(key)
    if existing is not None and num_local_tokens <= existing.num_local_tokens:
        existing.timeout_seconds = config.timeout_seconds
        return existing
    if group is not None:
        _meet(config, group, rank, f"num_local_tokens={num_local_tokens}, hidden_size={hidden_size}, topk={topk}")
        shape = _agree(shape, fault, group, ep_size, rank)
    buffers = _map_buffers(shape, group, rank)
    workspace = MoKWorkspace(shape, rank, buffers, device=device, group=group, timeout_seconds=config.timeout_seconds)
    _WORKSPACES[key] = workspace
    from mok_megatron import watchdog

    watchdog.watch(workspace)
    return workspace


def clear_workspaces() -> None:
    """Close every workspace of this process."""
    for workspace in list(_WORKSPACES.values()):
        workspace.close()


atexit.register(clear_workspaces)
