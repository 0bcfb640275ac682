"""Calls of a group of GPUs: the protocol runs in the kernels, the host only launches, and faults come back through host memory.

A kernel that gives up writes a record which the host reads without a word to the GPU, at the next call or from the watchdog's thread. A call
that this rank refuses is told to the peers' kernels by a status record in their memory. Either way the workspace cannot be used any more.
"""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch

from mok_megatron.config import MoKConfig
from mok_megatron.errors import MoKArgumentError, MoKCapacityError, MoKError, MoKPeerError, MoKTimeoutError
from mok_megatron.executors.cpu import WeightGradTarget
from mok_megatron.executors.cuda_backward import ALIGNMENT, BF16_FLAG, OVERWRITE_FLAG, grad_words, matrix_addresses
from mok_megatron.protocol import FATAL_RECORD, TEXT_BYTES, CallKind, PassTag, StatusCode, StatusWord, fatal_status_words
from mok_megatron.rendezvous import name_members
from mok_megatron.schedule import MoKContext, MoKSchedule
from mok_megatron.workspace import MoKWorkspace

# Calls whose tags are kept for messages: the host may run this far ahead of the GPU.
_REMEMBERED_CALLS = 4096
_PHASES = ("entered", "done", "local counter", "schedule exchange")
_NO_TAG = PassTag()
_TIMED_OUT, _PEER_FAULT, _BAD_ROUTE, _OVERFLOW = 1, 2, 3, 4


@dataclasses.dataclass(frozen=True, slots=True)
class LoggedCall:
    """A call as the host launched it."""

    number: int
    kind: CallKind
    tag: PassTag
    limit_seconds: float


class CallLog:
    """What the calls of a workspace were, by number. Replays of a CUDA graph are not seen here, and then have no name."""

    def __init__(self) -> None:
        # A ring: the watchdog's thread reads while calls are added.
        self._calls: list[LoggedCall | None] = [None] * _REMEMBERED_CALLS
        self._number = 0

    def add(self, kind: CallKind, tag: PassTag, limit_seconds: float) -> None:
        number = self._number = self._number + 1
        self._calls[number % _REMEMBERED_CALLS] = LoggedCall(number, kind, tag, limit_seconds)

    def find(self, number: int) -> LoggedCall | None:
        call = self._calls[number % _REMEMBERED_CALLS]
        return call if call is not None and call.number == number else None


def device_fault(workspace: MoKWorkspace) -> MoKError | None:
    """The error that the kernels of this rank recorded, if any. Reads host memory only."""
    code = workspace.executor.fault_code()
    if code == 0:
        return None
    _, phase, number, _, missing, expected, seen, waited, *detail = workspace.executor.fault.tolist()
    call = workspace.call_log.find(number)
    tag = call.tag if call else _NO_TAG
    name = f"{call.kind.name.lower()} of {tag} (call {number})" if call else f"call {number}"
    who = name_members(workspace.members, [workspace.rank, *(rank for rank in range(workspace.ep_size) if missing >> rank & 1)])
    where = f"rank {workspace.rank} of {workspace.ep_size}{f' ({who})' if who else ''}, {name}"
    if code == _BAD_ROUTE:
        kind, token, slot, expert = detail[:4]
        rule = f"must be -1 or in [0, {workspace.shape.num_experts})" if kind == 1 else "must not repeat inside a token's row"
        return MoKArgumentError(f"{where}: topk_experts[{token}, {slot}]={expert}: {rule}")
    if code == _OVERFLOW:
        return _capacity_error(workspace, where, workspace.rank, *detail[:2])
    if code == _PEER_FAULT:
        told = None
        with contextlib.suppress(RuntimeError):  # the GPU may not take the reading; then the record alone is told
            told = _peer_fault(workspace, where)
        if told is not None:
            return told
    ranks = tuple(rank for rank in range(workspace.ep_size) if missing >> rank & 1)
    limit = call.limit_seconds if call else workspace.timeout_seconds
    arrived = tuple(detail[: workspace.ep_size])
    seconds = waited / 1e9
    return MoKTimeoutError(
        f"{where}: rank(s) {', '.join(map(str, ranks)) or 'none'} missing; phase '{_PHASES[phase]}', expected {expected}, seen {seen} "
        f"(flags by rank: {list(arrived)}); waited {seconds:.1f} s, limit {limit:g} s"
        + ("; reported by a peer" if code == _PEER_FAULT else ""),
        rank=workspace.rank,
        missing_ranks=ranks,
        layer=tag.layer,
        microbatch=tag.microbatch,
        phase=_PHASES[phase],
        expected=expected,
        arrived=arrived,
        waited_seconds=seconds,
        limit_seconds=limit,
    )


def raise_device_fault(workspace: MoKWorkspace) -> None:
    """Raise what the kernels recorded; the workspace is lost then."""
    fault = device_fault(workspace)
    if fault is not None:
        workspace.fail(fault)
        workspace.failure_raised = True
        tell_peers(workspace, fault)
        raise fault


def tell_peers(workspace: MoKWorkspace, fault: MoKError) -> None:
    """Publish a bad route, which this rank's kernels alone have seen: without a word the peers would wait for a rank that has raised.

    Where the GPU takes no more work the peers end by their time-out; the fault is to be raised all the same.
    """
    if isinstance(fault, MoKArgumentError):
        # A stream of its own: the caller may be the watchdog's thread.
        with contextlib.suppress(RuntimeError), torch.cuda.device(workspace.device), torch.cuda.stream(torch.cuda.Stream(workspace.device)):
            _publish_failure(workspace, str(fault))


class DeviceCall:
    """One numbered call, for a `with` statement. An error in it is published to the peers' kernels, and is fatal for the workspace.

    Attributes: limit_seconds; new_weights (weights whose form is not known yet, by argument: `check_contiguous` looks at them).
    """

    __slots__ = ("_config", "_kind", "_tag", "_workspace", "limit_seconds", "new_weights")

    def __init__(self, workspace: MoKWorkspace, config: MoKConfig, kind: CallKind, tag: PassTag | None) -> None:
        self._workspace, self._config, self._kind, self._tag = workspace, config, kind, tag
        self.new_weights: list[tuple[str, torch.Tensor | Sequence[torch.Tensor]]] = []
        workspace.check_usable()
        if workspace.executor.fault_code():
            raise_device_fault(workspace)
        self.limit_seconds = config.timeout_seconds if isinstance(config, MoKConfig) else workspace.timeout_seconds

    def __enter__(self) -> "DeviceCall":
        try:
            self._workspace.check_config(self._config)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        workspace = self._workspace
        if error is None:
            workspace.call_log.add(self._kind, self._tag or _NO_TAG, self.limit_seconds)
            return
        fault = error if isinstance(error, MoKError) else MoKError(f"rank {workspace.rank}: {error!r}")
        workspace.fail(fault)
        workspace.failure_raised = True
        _publish_failure(workspace, str(fault))


def _publish_failure(workspace: MoKWorkspace, text: str) -> None:
    """Tell the peers' kernels, by stores on this rank's stream, that this rank will not come, and why."""
    data = torch.frombuffer(bytearray(text.encode()[:TEXT_BYTES]), dtype=torch.uint8).to(workspace.device)
    words = torch.zeros(len(StatusWord), dtype=torch.int64)
    words[StatusWord.CALL], words[StatusWord.CODE], words[StatusWord.LENGTH] = 1, StatusCode.FAILED, len(data)
    placed = words.to(workspace.device)
    for peer, buffers in enumerate(workspace.buffers):
        if peer != workspace.rank:
            buffers.flags.texts[workspace.rank, FATAL_RECORD, : len(data)] = data
            buffers.flags.words[workspace.rank, fatal_status_words()] = placed


def _capacity_error(workspace: MoKWorkspace, where: str, rank: int, needed: int, available: int) -> MoKCapacityError:
    return MoKCapacityError(
        f"{where}: rank {rank} needs {needed} rows (padded), available are {available} with schedule_capacity_multiplier="
        f"{workspace.shape.schedule_capacity_multiplier}. Nothing was written out of bounds; raise the multiplier",
        rank=rank,
        needed_rows=needed,
        available_rows=available,
    )


def _peer_fault(workspace: MoKWorkspace, where: str) -> MoKError | None:
    """What the first peer at fault published, other than a time-out. Reads the GPU on a stream of its own."""
    with torch.cuda.device(workspace.device), torch.cuda.stream(torch.cuda.Stream(workspace.device)):
        flags = workspace.mine.flags
        words, texts = flags.words[:, fatal_status_words()].tolist(), flags.texts[:, FATAL_RECORD].cpu()
    for peer, record in enumerate(words):
        length = record[StatusWord.LENGTH]
        if record[StatusWord.CODE] == StatusCode.OVERFLOW:
            return _capacity_error(workspace, where, peer, record[StatusWord.MISSING], length)
        if record[StatusWord.CODE] == StatusCode.FAILED:
            text = bytes(texts[peer, :length].tolist()).decode(errors="replace")
            return MoKPeerError(f"{where}: rank {peer} refused it or failed: {text}", peer=peer)
    return None


def device_schedule(workspace: MoKWorkspace, call: DeviceCall, topk_experts: torch.Tensor) -> MoKSchedule:
    """Launch the schedule's kernels. Bad ids and overflow are found there, and raised by a later call or the watchdog."""
    if topk_experts.dtype not in (torch.int32, torch.int64):
        topk_experts = topk_experts.to(torch.int64)
    return workspace.executor.build_schedule(topk_experts.contiguous(), call.limit_seconds)


def are_good_weights(workspace: MoKWorkspace, name: str, weights: object, rows: int, cols: int) -> bool:
    """Whether these are weights [E_local, rows, cols] as the kernels read them. The look that every call takes; False tells nothing."""
    if isinstance(weights, torch.Tensor):
        return (
            weights.shape == (workspace.num_local_experts, rows, cols)
            and weights.dtype is workspace.dtype
            and weights.device == workspace.device
            and weights.layout is torch.strided
            and weights.is_contiguous()
        )
    return workspace.known_tensors[name].match(weights)


def check_contiguous(workspace: MoKWorkspace, call: DeviceCall) -> None:
    """Weights that are new to the workspace: of the right sizes, and now to be contiguous, as the kernels read them where they lie.

    Raises:
        MoKArgumentError: a weight is not.
    """
    for name, weights in call.new_weights:
        stacked = isinstance(weights, torch.Tensor)
        for index, weight in enumerate((weights,) if stacked else weights):
            if not weight.is_contiguous():
                raise MoKArgumentError(f"{name}[{index}]: strides {weight.stride()} must be those of a contiguous matrix on a GPU")
        if not stacked:
            workspace.known_tensors[name].learn(weights)


def _placed(tokens: torch.Tensor) -> torch.Tensor:
    """Rows as the kernels read them: contiguous, on 16 bytes."""
    tokens = tokens.contiguous()
    return tokens.clone() if tokens.data_ptr() % ALIGNMENT else tokens


def device_forward(
    workspace: MoKWorkspace,
    call: DeviceCall,
    config: MoKConfig,
    schedule: MoKSchedule,
    x: torch.Tensor,
    router_weights: torch.Tensor,
    w13: torch.Tensor | Sequence[torch.Tensor],
    w2: torch.Tensor | Sequence[torch.Tensor],
    context: MoKContext | None,
) -> torch.Tensor:
    """Launch the forward megakernel. Returns y [T, H], not yet computed.

    Raises:
        MoKArgumentError: a weight is not contiguous, or does not lie on 16 bytes.
    """
    check_contiguous(workspace, call)
    return workspace.executor.forward(
        schedule,
        _placed(x),
        router_weights.contiguous(),
        w13,
        w2,
        context=context,
        timeout_seconds=call.limit_seconds,
        num_comm_sms=config.fwd_num_comm_sms or 0,
        sm_reserve=config.sm_reserve,
    )


def device_recompute(
    workspace: MoKWorkspace,
    call: DeviceCall,
    config: MoKConfig,
    schedule: MoKSchedule,
    x: torch.Tensor,
    router_weights: torch.Tensor,
    w13: torch.Tensor | Sequence[torch.Tensor],
    context: MoKContext,
) -> None:
    """Launch what fills the context again.

    Raises:
        MoKArgumentError: a weight is not contiguous, or does not lie on 16 bytes.
    """
    check_contiguous(workspace, call)
    workspace.executor.recompute(
        schedule,
        _placed(x),
        router_weights.contiguous(),
        w13,
        context=context,
        timeout_seconds=call.limit_seconds,
        sm_reserve=config.sm_reserve,
    )


def _good_gradients(
    workspace: MoKWorkspace, name: str, grads: Any, overwrite: Any, rows: int, cols: int
) -> tuple[Sequence[int], Sequence[int]] | None:
    """Addresses of gradients that the kernels can write, and the same with flags; None tells nothing."""
    experts = workspace.num_local_experts
    if grads is None:
        return (), [0] * experts
    if isinstance(grads, torch.Tensor):
        good = grads.shape == (experts, rows, cols) and grads.device == workspace.device and grads.layout is torch.strided
        if not good or grads.dtype not in (torch.float32, torch.bfloat16) or not grads.is_contiguous():
            return None
        dtype = grads.dtype
    elif workspace.known_tensors[name].match(grads):
        dtype = grads[0].dtype
    else:
        return None
    addresses = matrix_addresses(grads)
    if functools.reduce(operator.or_, addresses) % ALIGNMENT:
        return None
    low = BF16_FLAG if dtype is torch.bfloat16 else 0
    if not isinstance(overwrite, bool):
        if not isinstance(overwrite, (list, tuple)) or len(overwrite) != experts or {*map(type, overwrite)} != {bool}:
            return None
        if any(overwrite) and not all(overwrite):
            return addresses, [address | low | OVERWRITE_FLAG * flag for address, flag in zip(addresses, overwrite, strict=True)]
        overwrite = overwrite[0]
    low |= OVERWRITE_FLAG if overwrite else 0
    return addresses, [address | low for address in addresses] if low else addresses


def good_targets(workspace: MoKWorkspace, main_grads: Any, overwrite: Any) -> tuple[Sequence[int], Sequence[int]] | None:
    """Words of the gradients of w13 and of w2 as the kernels take them, where their form is known and right. The look that every call takes.

    None tells nothing: the full check finds out, and `check_targets` takes note.
    """
    pairs = (main_grads, overwrite)
    if not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
        return None
    hidden, inner = workspace.hidden_size, workspace.intermediate_size
    one = _good_gradients(workspace, "main_grads (w13)", main_grads[0], overwrite[0], 2 * inner, hidden)
    if one is None:
        return None
    two = _good_gradients(workspace, "main_grads (w2)", main_grads[1], overwrite[1], hidden, inner)
    # No two gradients may start at one address.
    if two is None or len({*one[0], *two[0]}) != len(one[0]) + len(two[0]):
        return None
    return one[1], two[1]


def check_targets(workspace: MoKWorkspace, name: str, targets: Sequence[WeightGradTarget]) -> list[int]:
    """Words of E_local gradients of the right sizes that are new to the workspace.

    Raises:
        MoKArgumentError: one is not contiguous, or does not lie on 16 bytes.
    """
    words = grad_words(name, targets)
    tensors = [target.tensor for target in targets]
    if all(tensor is not None and tensor.dtype == tensors[0].dtype for tensor in tensors):
        workspace.known_tensors[name].learn(tensors)
    return words


def check_context(context: MoKContext) -> None:
    """Raise MoKArgumentError where a part of the context is not contiguous."""
    for name, tensor in (("ctx.x_rows", context.x_rows), ("ctx.gate_up", context.gate_up)):
        if not tensor.is_contiguous():
            raise MoKArgumentError(f"{name}: strides {tensor.stride()} must be those of a contiguous matrix on a GPU")


def device_backward(
    workspace: MoKWorkspace,
    call: DeviceCall,
    config: MoKConfig,
    schedule: MoKSchedule,
    context: MoKContext,
    dy: torch.Tensor,
    x: torch.Tensor,
    router_weights: torch.Tensor,
    w13: torch.Tensor | Sequence[torch.Tensor],
    w2: torch.Tensor | Sequence[torch.Tensor],
    targets: tuple[Sequence[WeightGradTarget], Sequence[WeightGradTarget]],
    words: tuple[Sequence[int], Sequence[int]] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the backward megakernel. Returns dx [T, H] and d_router_weights fp32 [T, K]; weight gradients go to their targets.

    Args:
        words: of the targets, as `good_targets` gives them; None: they are made of `targets`.

    Raises:
        MoKArgumentError: a weight, a gradient or a part of the context is not contiguous, or a gradient does not lie on 16 bytes.
    """
    check_contiguous(workspace, call)
    check_context(context)
    if words is None:
        words = tuple(check_targets(workspace, name, part) for name, part in zip(("main_grads (w13)", "main_grads (w2)"), targets, strict=True))
    return workspace.executor.backward(
        schedule,
        context,
        _placed(dy),
        _placed(x),
        router_weights.contiguous(),
        w13,
        w2,
        *words,
        timeout_seconds=call.limit_seconds,
        sm_reserve=config.sm_reserve,
    )
