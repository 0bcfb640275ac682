"""One rank's side of a group: symmetric buffers, flags and rings. One per (group, shapes), shared by all layers."""

import atexit
import dataclasses
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mok_megatron.buffers import Rings, SymmetricBuffers, WorkspaceShape
from mok_megatron.build import build_info, check_device_architecture
from mok_megatron.config import MoKConfig
from mok_megatron.errors import MoKArgumentError, MoKError
from mok_megatron.known_tensors import KnownTensors
from mok_megatron.protocol import CallKind, CallState, Flag, FlagWait, GroupProtocol, PassTag, StatusCode, poll
from mok_megatron.rendezvous import Member, gather
from mok_megatron.symmetric_memory import map_device_buffers, map_host_buffers

if TYPE_CHECKING:
    from mok_megatron.executors.cuda import CudaExecutor


class MoKWorkspace:
    """One rank's side of a group's buffers. Made by `get_workspace`.

    Attributes: shape (WorkspaceShape) and its sizes by name, rank, device, buffers (SymmetricBuffers of every rank), rings and protocol (on the
    CPU), executor (of the kernels; None on the CPU), known_tensors (weights and gradients that passed a call's checks, by argument),
    minibatch_size and macrobatch_size as resolved, failure (the fatal error after which nothing works any more, or None).
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
        members: Sequence[Member] = (),
    ) -> None:
        self.shape = shape
        self.rank = rank
        self.group = group
        self.device = device
        self.buffers = buffers
        self.members = members
        self.timeout_seconds = timeout_seconds
        self.minibatch_size, self.macrobatch_size = shape.ring(num_sms)
        self.ep_size, self.num_local_tokens, self.topk = shape.ep_size, shape.num_local_tokens, shape.topk
        self.hidden_size, self.intermediate_size, self.dtype = shape.hidden_size, shape.intermediate_size, shape.dtype
        self.num_local_experts, self.capacity_rows = shape.num_local_experts, shape.capacity_rows
        self.executor: CudaExecutor | None = None
        self.known_tensors = {name: KnownTensors() for name in ("w13", "w2", "main_grads (w13)", "main_grads (w2)")}
        self._good_config: MoKConfig | None = None
        if device.type == "cuda":
            self._start_device()
        else:
            self.rings = Rings.allocate(shape, self.macrobatch_size, device)
            self.protocol = GroupProtocol(rank, [b.flags for b in buffers], torch.zeros(1, dtype=torch.int64, device=device), members)
        self.failure: MoKError | None = None
        self.failure_raised = False
        self.in_call = False

    def _start_device(self) -> None:
        """The kernels' protocol, counters and rings."""
        from mok_megatron.device_calls import CallLog
        from mok_megatron.executors.cuda import CudaExecutor, ExecutorShape, RankMemory

        shape, rows = self.shape, self.macrobatch_size

        def ring(*width: int, dtype: torch.dtype = shape.dtype) -> torch.Tensor:
            return torch.empty(rows, *width, dtype=dtype, device=self.device)

        self.call_log = CallLog()
        self.executor = CudaExecutor(
            ExecutorShape(
                self.rank,
                shape.ep_size,
                shape.num_local_tokens,
                shape.topk,
                shape.hidden_size,
                shape.intermediate_size,
                shape.num_local_experts,
                self.minibatch_size,
                rows,
                shape.capacity_rows,
            ),
            [
                RankMemory(b.x, b.router_weights, b.combine, b.flags.words, b.topk_experts, b.num_tokens, b.dy, b.d_router_weights)
                for b in self.buffers
            ],
            ring(shape.hidden_size),
            ring(shape.intermediate_size),
            ring(dtype=torch.float32),
        )

    @property
    def mine(self) -> SymmetricBuffers:
        return self.buffers[self.rank]

    def memory_bytes(self) -> dict[str, int]:
        """Bytes that this rank holds, by purpose."""
        if self.executor is not None:
            rings = self.executor.memory_bytes()
        else:
            rings = {f"ring.{f.name}": getattr(self.rings, f.name).nbytes for f in dataclasses.fields(Rings)}
        return {"symmetric": SymmetricBuffers.num_bytes(self.shape), **rings}

    def context_bytes(self) -> int:
        """Bytes that one call's context keeps for the backward: macrobatch_size * (H + 2I) elements."""
        return self.macrobatch_size * (self.hidden_size + 2 * self.intermediate_size) * self.dtype.itemsize

    def fail(self, error: MoKError) -> None:
        """Record a fatal error: no call works after it."""
        if self.failure is None:
            self.failure = error

    def check_config(self, config: object) -> None:
        """A call's config must have the sizes that this workspace was made with, and leave SMs for the products.

        Raises:
            MoKArgumentError: it has others, leaves none, or is no config.
        """
        if config is not None and config is self._good_config:  # configs are frozen
            return
        if not isinstance(config, MoKConfig):
            raise MoKArgumentError(f"config={config!r}: must be a MoKConfig")
        for name in ("minibatch_size", "macrobatch_size", "schedule_capacity_multiplier"):
            if getattr(config, name) != getattr(self.shape, name):
                raise MoKArgumentError(f"config.{name}={getattr(config, name)}: the workspace was made with {getattr(self.shape, name)}")
        if self.executor is not None:
            config.check_sms(self.executor.num_sms)
        self._good_config = config

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


def _meet(config: MoKConfig, group: Any, rank: int, request: str) -> None:
    """Make sure that every rank of the group is here before anything collective starts.

    A rank that asks for a new workspace while its peers found theirs in the cache would wait for them forever: where the group has a workspace
    already, the ranks meet in a call of it, and a peer that is in another call is an error on both sides.

    Raises:
        MoKArgumentError: the peers are elsewhere.
    """
    timeout = config.timeout_seconds if isinstance(config, MoKConfig) else MoKConfig.timeout_seconds
    known = [w for w in _WORKSPACES.values() if w.group is group and w.failure is None and w.device.type == "cpu"]
    if not known:
        return  # they meet where they agree on the sizes
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


def _agree(
    shape: WorkspaceShape | None, fault: Exception | None, group: Any, rank: int, timeout_seconds: float
) -> tuple[WorkspaceShape, list[Member]]:
    """The shape that all ranks agree on and who they are, or the same error on all of them."""
    mine = (shape, None if fault is None else f"{fault}", Member.here())
    gathered = gather(group, mine, timeout_seconds, "agreeing on the workspace's sizes")
    faults = [f"rank {r}: {text}" for r, (_, text, _) in enumerate(gathered) if text is not None]
    if faults:
        raise MoKArgumentError("; ".join(faults)) from fault
    shapes = [s for s, _, _ in gathered]
    agreed = dataclasses.replace(shapes[0], num_local_tokens=max(s.num_local_tokens for s in shapes))
    for field in dataclasses.fields(WorkspaceShape):
        if field.name == "num_local_tokens":
            continue
        values = [getattr(s, field.name) for s in shapes]
        if any(value != values[0] for value in values):
            raise MoKArgumentError(f"{field.name}={values[rank]}: must be equal on all ranks of the group, is {values}")
    return agreed, [member for _, _, member in gathered]


def _usable_device(device: torch.device | str, dtype: torch.dtype) -> torch.device:
    """The device, with its index.

    Raises:
        MoKArgumentError: no such device, or no executor or kernels for it.
    """
    try:
        made = torch.device(device)
        if made.type == "cuda":
            made = torch.device("cuda", torch.cuda.current_device() if made.index is None else made.index)
            check_device_architecture(build_info(), torch.cuda.get_device_capability(made))
    except (RuntimeError, AssertionError, TypeError) as error:  # MoKBuildError is a RuntimeError
        raise MoKArgumentError(f"device={device!r}: {error}") from error
    if made.type not in ("cpu", "cuda"):
        raise MoKArgumentError(f"device={made}: must be cpu or cuda")
    if made.type == "cuda" and dtype != torch.bfloat16:
        raise MoKArgumentError(f"dtype={dtype}: must be torch.bfloat16 on a GPU")
    return made


def _plain_int(value: Any) -> Any:
    """Integers of other libraries as Python's; anything else as it is, for the check that names it."""
    if isinstance(value, bool):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


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
        MoKUnsupportedError: the group spans hosts.
        MoKTimeoutError: a rank did not come within config.timeout_seconds.
    """
    rank = 0 if group is None else dist.get_rank(group)
    timeout = config.timeout_seconds if isinstance(config, MoKConfig) else MoKConfig.timeout_seconds
    shape, fault = None, None
    try:
        if not isinstance(config, MoKConfig):
            raise MoKArgumentError(f"config={config!r}: must be a MoKConfig")
        device = _usable_device(device, dtype)
        if device.type == "cuda":
            config.check_sms(num_sms(device))
        shape = WorkspaceShape(
            1 if group is None else dist.get_world_size(group),
            *map(_plain_int, (num_local_tokens, hidden_size, topk, num_local_experts, intermediate_size)),
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
    if existing is not None and existing.failure is None and num_local_tokens <= existing.num_local_tokens:
        existing.timeout_seconds = config.timeout_seconds
        return existing
    members: list[Member] = []
    if group is not None:
        _meet(config, group, rank, f"num_local_tokens={num_local_tokens}, hidden_size={hidden_size}, topk={topk}")
        shape, members = _agree(shape, fault, group, rank, timeout)
    workspace = _make(shape, group, rank, device, timeout, members)
    _WORKSPACES[key] = workspace
    from mok_megatron import watchdog

    watchdog.watch(workspace)
    return workspace


def num_sms(device: torch.device) -> int:
    """Multiprocessors that a workspace on this device is sized for: the GPU's, 1 on the CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _make(
    shape: WorkspaceShape, group: Any, rank: int, device: torch.device, timeout_seconds: float, members: Sequence[Member]
) -> MoKWorkspace:
    """Allocate and map; a rank without enough memory is an error on all."""
    # Tensors that were made under inference mode could never be written outside of it.
    with torch.inference_mode(False), torch.no_grad():
        if device.type == "cuda":
            buffers = map_device_buffers(shape, group, rank, device, timeout_seconds)
        else:
            buffers = map_host_buffers(shape, group, rank, timeout_seconds)
        workspace, fault = None, None
        try:
            workspace = MoKWorkspace(
                shape, rank, buffers, device=device, group=group, num_sms=num_sms(device), timeout_seconds=timeout_seconds, members=members
            )
        except (RuntimeError, MemoryError) as error:
            fault = MoKArgumentError(f"num_local_tokens={shape.num_local_tokens}: the workspace cannot be made: {error}")
        texts = [fault] if group is None else gather(group, None if fault is None else str(fault), timeout_seconds, "making rings")
        faults = [f"rank {r}: {text}" for r, text in enumerate(texts) if text is not None]
        if faults:
            raise MoKArgumentError("; ".join(faults)) from fault
    return workspace


def clear_workspaces() -> None:
    """Close every workspace of this process. All ranks of a group must do it, or none: the next get_workspace is a meeting of them all."""
    for workspace in list(_WORKSPACES.values()):
        workspace.close()


atexit.register(clear_workspaces)
