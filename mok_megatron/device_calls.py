"""Calls of a group of GPUs: the protocol runs in the kernels, the host only launches, and faults come back through host memory.

A kernel that gives up writes a record which the host reads without a word to the GPU, at the next call or from the watchdog's thread. A call
that this rank refuses is told to the peers' kernels by a status record in their memory. Either way the workspace cannot be used any more.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Iterator

import torch

from mok_megatron.config import MoKConfig
from mok_megatron.errors import MoKArgumentError, MoKCapacityError, MoKError, MoKPeerError, MoKTimeoutError
from mok_megatron.executors.cpu import PassInputs
from mok_megatron.protocol import FATAL_RECORD, TEXT_BYTES, CallKind, PassTag, StatusCode, StatusWord, fatal_status_words
from mok_megatron.rendezvous import name_members
from mok_megatron.schedule import MoKSchedule
from mok_megatron.workspace import MoKWorkspace

# Calls whose tags are kept for messages: the host may run this far ahead of the GPU.
_REMEMBERED_CALLS = 4096
_PHASES = ("entered", "done", "local counter", "schedule exchange")
_TIMED_OUT, _PEER_FAULT, _BAD_ROUTE, _OVERFLOW = 1, 2, 3, 4


@dataclasses.dataclass(frozen=True)
class DeviceCall:
    """A call as the host launched it."""

    kind: CallKind
    tag: PassTag
    limit_seconds: float


class CallLog:
    """What the calls of a workspace were, by number. Replays of a CUDA graph are not seen here, and then have no name."""

    def __init__(self) -> None:
        self._calls: collections.OrderedDict[int, DeviceCall] = collections.OrderedDict()
        self._number = 0

    def add(self, call: DeviceCall) -> None:
        self._number += 1
        self._calls[self._number] = call
        if len(self._calls) > _REMEMBERED_CALLS:
            self._calls.popitem(last=False)

    def find(self, number: int) -> DeviceCall | None:
        return self._calls.get(number)


def device_fault(workspace: MoKWorkspace) -> MoKError | None:
    """The error that the kernels of this rank recorded, if any. Reads host memory only."""
    code = workspace.executor.fault_code()
    if code == 0:
        return None
    _, phase, number, _, missing, expected, seen, waited, *detail = workspace.executor.fault.tolist()
    call = workspace.call_log.find(number)
    tag = call.tag if call else PassTag()
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
        raise fault


@contextlib.contextmanager
def device_call(workspace: MoKWorkspace, config: MoKConfig, kind: CallKind, tag: PassTag | None) -> Iterator[DeviceCall]:
    """One numbered call. An error in it is published to the peers' kernels, and is fatal for the workspace."""
    workspace.check_usable()
    raise_device_fault(workspace)
    known = isinstance(config, MoKConfig)
    call = DeviceCall(kind, tag or PassTag(), config.timeout_seconds if known else workspace.timeout_seconds)
    try:
        workspace.check_config(config)
        yield call
    except BaseException as error:
        fault = error if isinstance(error, MoKError) else MoKError(f"rank {workspace.rank}: {error!r}")
        workspace.fail(fault)
        workspace.failure_raised = True
        _publish_failure(workspace, str(fault))
        raise
    workspace.call_log.add(call)


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
    wide = topk_experts.dtype not in (torch.int32, torch.int64)
    routes = (topk_experts.to(torch.int64) if wide else topk_experts).contiguous()
    return workspace.executor.build_schedule(routes, call.limit_seconds)


def _check_contiguous(inputs: PassInputs) -> None:
    """Raise MoKArgumentError where a weight is not contiguous: the kernels read it where it lies."""
    for name, weights in (("w13", inputs.w13), ("w2", inputs.w2)):
        if weights is None:
            continue
        for index, weight in enumerate((weights,) if isinstance(weights, torch.Tensor) else weights):
            if not weight.is_contiguous():
                raise MoKArgumentError(f"{name}[{index}]: strides {weight.stride()} must be those of a contiguous matrix on a GPU")


def device_forward(workspace: MoKWorkspace, call: DeviceCall, config: MoKConfig, schedule: MoKSchedule, inputs: PassInputs) -> torch.Tensor:
    """Launch the forward megakernel. Returns y [T, H], not yet computed.

    Raises:
        MoKArgumentError: a weight is not contiguous.
    """
    _check_contiguous(inputs)
    return workspace.executor.forward(
        schedule,
        inputs.x.contiguous(),
        inputs.router_weights.contiguous(),
        inputs.w13,
        inputs.w2,
        context=inputs.context,
        timeout_seconds=call.limit_seconds,
        num_comm_sms=config.fwd_num_comm_sms or 0,
        sm_reserve=config.sm_reserve,
    )


def device_recompute(workspace: MoKWorkspace, call: DeviceCall, config: MoKConfig, schedule: MoKSchedule, inputs: PassInputs) -> None:
    """Launch what fills inputs.context again.

    Raises:
        MoKArgumentError: a weight is not contiguous.
    """
    _check_contiguous(inputs)
    workspace.executor.recompute(
        schedule,
        inputs.x.contiguous(),
        inputs.router_weights.contiguous(),
        inputs.w13,
        context=inputs.context,
        timeout_seconds=call.limit_seconds,
        sm_reserve=config.sm_reserve,
    )


def device_backward(
    workspace: MoKWorkspace, call: DeviceCall, config: MoKConfig, schedule: MoKSchedule, inputs: PassInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the backward megakernel. Returns dx [T, H] and d_router_weights fp32 [T, K]; weight gradients go to their targets.

    Raises:
        MoKArgumentError: a weight, a gradient or a part of the context is not contiguous, or a gradient does not lie on 16 bytes.
    """
    _check_contiguous(inputs)
    for name, tensor in (("ctx.x_rows", inputs.context.x_rows), ("ctx.gate_up", inputs.context.gate_up)):
        if not tensor.is_contiguous():
            raise MoKArgumentError(f"{name}: strides {tensor.stride()} must be those of a contiguous matrix on a GPU")
    return workspace.executor.backward(
        schedule,
        inputs.context,
        inputs.dy.contiguous(),
        inputs.x.contiguous(),
        inputs.router_weights.contiguous(),
        inputs.w13,
        inputs.w2,
        inputs.grads13,
        inputs.grads2,
        timeout_seconds=call.limit_seconds,
        sm_reserve=config.sm_reserve,
    )
