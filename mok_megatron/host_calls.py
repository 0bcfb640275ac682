"""Calls of a group whose ranks are processes of one host: the protocol runs here, and the CPU executor does the passes."""

import contextlib
from collections.abc import Iterator, Sequence

import torch

from mok_megatron.config import BLOCK_ROWS, MoKConfig
from mok_megatron.errors import MoKArgumentError, MoKCapacityError, MoKError, MoKPeerError, MoKTimeoutError
from mok_megatron.executors.cpu import CpuPass, PassInputs, PassOutputs, drive, exchange_routes
from mok_megatron.ops import Pass, RouteFaultKind, find_route_fault, route_schedule
from mok_megatron.protocol import CallKind, CallState, Flag, FlagWait, PassTag, StatusCode, poll
from mok_megatron.schedule import MoKSchedule
from mok_megatron.workspace import MoKWorkspace


@contextlib.contextmanager
def host_call(workspace: MoKWorkspace, config: MoKConfig, kind: CallKind, tag: PassTag | None) -> Iterator[CallState]:
    """One numbered call: what fails inside it on one rank is raised on all of them.

    A refusal (a bad argument, too many rows) is published, the group waits until nobody touches anybody's memory any more, and goes on with
    the next call. Anything else is fatal for the workspace.
    """
    workspace.check_usable()
    protocol = workspace.protocol
    known = isinstance(config, MoKConfig)
    state = CallState(protocol, protocol.call, kind, tag or PassTag(), config.timeout_seconds if known else workspace.timeout_seconds)
    workspace.in_call = True
    try:
        try:
            workspace.check_config(config)
            yield state
        except MoKArgumentError as error:
            protocol.publish_status(state.call, StatusCode.REFUSED, str(error))
            protocol.signal_entered(state.call, kind, state.tag)
            _drain(state)
            raise
        except MoKPeerError:
            if not _is_fatal(state):
                _drain(state)
            raise
        protocol.advance()
    except MoKTimeoutError as error:
        _fail(workspace, state, StatusCode.TIMED_OUT, error, error.missing_ranks)
        raise
    except (MoKArgumentError, MoKCapacityError):
        # Every rank counts the same routes, so that every rank raises a MoKCapacityError by itself.
        protocol.advance()
        raise
    except MoKPeerError as error:
        if _is_fatal(state):
            _fail(workspace, state, StatusCode.FAILED, error)
        else:
            protocol.advance()
        raise
    except BaseException as error:
        fault = error if isinstance(error, MoKError) else MoKError(f"rank {workspace.rank}, {state.name}: {error!r}")
        _fail(workspace, state, StatusCode.FAILED, fault)
        raise
    finally:
        workspace.in_call = False


def _fail(workspace: MoKWorkspace, state: CallState, code: StatusCode, error: MoKError, missing: Sequence[int] = ()) -> None:
    workspace.fail(error)
    workspace.failure_raised = True
    state.protocol.publish_status(state.call, code, str(error), missing)


def _is_fatal(state: CallState) -> bool:
    return any(state.fatal_fault(peer) is not None for peer in range(state.protocol.ep_size))


def _drain(state: CallState) -> None:
    """Leave a refused call: say that this rank is through with its peers' memory, and wait until they are with its own."""
    protocol = state.protocol
    flag = Flag.ENTERED if state.kind == CallKind.SCHEDULE else Flag.DONE
    if flag == Flag.DONE:
        protocol.signal_done(state.call)
    poll(_ArrivalWait(state, flag, range(protocol.ep_size)), state.limit_seconds)


class _ArrivalWait(FlagWait):
    """A FlagWait that a refusal does not end."""

    def ready(self) -> bool:
        return not self.missing()


def needed_rows(topk_experts: torch.Tensor, num_tokens: list[int], num_experts: int, num_local_experts: int) -> list[int]:
    """Padded rows that each rank would need."""
    counts = torch.zeros(num_experts, dtype=torch.int64, device="cpu")
    for rank, tokens in enumerate(num_tokens):
        routes = topk_experts[rank, :tokens].flatten()
        counts += torch.bincount(routes[routes >= 0], minlength=num_experts)
    padded = (counts + BLOCK_ROWS - 1) // BLOCK_ROWS * BLOCK_ROWS
    return padded.view(-1, num_local_experts).sum(dim=1).tolist()


def host_schedule(workspace: MoKWorkspace, state: CallState, topk_experts: torch.Tensor) -> MoKSchedule:
    """Check this rank's routes, gather everybody's, and build this rank's schedule.

    Raises:
        MoKArgumentError, MoKCapacityError, MoKPeerError, MoKTimeoutError: see functional.build_schedule.
    """
    shape, rank = workspace.shape, workspace.rank
    wide = topk_experts.to(torch.int64)
    out_of_range = (wide < -1) | (wide >= shape.num_experts)
    # Narrow only what fits: an id beyond 32 bits must not wrap into a valid one.
    routes = torch.where(out_of_range, shape.num_experts, wide).to(torch.int32).contiguous()
    fault, token, slot, _ = find_route_fault(routes, shape.num_experts)
    if fault != RouteFaultKind.NONE:
        expert = int(wide[token, slot])
        out = fault == RouteFaultKind.OUT_OF_RANGE
        rule = f"must be -1 or in [0, {shape.num_experts})" if out else "must not repeat inside a token's row"
        raise MoKArgumentError(f"topk_experts[{token}, {slot}]={expert} on rank {rank}: {rule}")
    gathered, num_tokens = drive(exchange_routes(workspace, state, routes), state.limit_seconds)
    if shape.schedule_capacity_multiplier < 1:
        needed = needed_rows(gathered, num_tokens.tolist(), shape.num_experts, shape.num_local_experts)
        worst = max(range(workspace.ep_size), key=needed.__getitem__)
        if needed[worst] > shape.capacity_rows:
            raise MoKCapacityError(
                f"rank {worst} needs {needed[worst]} rows (padded), available are {shape.capacity_rows} with "
                f"schedule_capacity_multiplier={shape.schedule_capacity_multiplier}; rows needed by rank: {needed}. "
                "No row was dropped; raise the multiplier",
                rank=worst,
                needed_rows=needed[worst],
                available_rows=shape.capacity_rows,
            )
    tables = route_schedule(gathered, num_tokens, rank, shape.num_local_experts, shape.capacity_rows)
    return MoKSchedule(routes.shape[0], *tables, topk_experts=routes)


def host_pass(workspace: MoKWorkspace, state: CallState, kind: Pass, schedule: MoKSchedule, inputs: PassInputs) -> PassOutputs:
    """Run a pass to its end."""
    return drive(CpuPass(workspace, schedule, state, kind, inputs).run(), state.limit_seconds)
