"""Public functions: build_schedule, forward, recompute_forward_context, backward over a workspace. No autograd graph is built here.

Every function is a collective call of the workspace's group: all ranks make the same calls in the same order, with any number of tokens each.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from mok_megatron.config import MoKConfig
from mok_megatron.device_calls import (
    DeviceCall,
    are_good_weights,
    device_backward,
    device_forward,
    device_recompute,
    device_schedule,
    good_targets,
)
from mok_megatron.errors import MoKArgumentError
from mok_megatron.executors.cpu import PassInputs, WeightGradTarget
from mok_megatron.host_calls import host_call, host_pass, host_schedule
from mok_megatron.ops import Pass
from mok_megatron.protocol import CallKind, PassTag
from mok_megatron.schedule import MoKContext, MoKSchedule
from mok_megatron.workspace import MoKWorkspace, clear_workspaces, get_workspace

__all__ = [
    "MoKContext",
    "MoKSchedule",
    "PassTag",
    "backward",
    "build_schedule",
    "clear_workspaces",
    "forward",
    "get_workspace",
    "recompute_forward_context",
]

WeightArgument = torch.Tensor | Sequence[torch.Tensor]
GradArgument = torch.Tensor | Sequence[torch.Tensor | None] | None
OverwriteArgument = bool | Sequence[bool]


_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.uint8, torch.int8)


def _call(workspace: MoKWorkspace, config: MoKConfig, kind: CallKind, tag: PassTag | None) -> contextlib.AbstractContextManager[Any]:
    """One numbered call: what fails inside it on one rank is raised on all of them."""
    if not isinstance(workspace, MoKWorkspace):
        # Without a workspace there is no group to tell; the order of the arguments is not the same in all functions.
        raise MoKArgumentError(f"workspace: must be a MoKWorkspace, is {type(workspace).__name__}")
    if workspace.executor is not None:
        return DeviceCall(workspace, config, kind, tag)
    return host_call(workspace, config, kind, tag)


def _check_tensor(name: str, value: object, sizes: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    if (
        isinstance(value, torch.Tensor)
        and value.shape == sizes
        and value.dtype in dtypes
        and value.device == device
        and value.layout is torch.strided
    ):
        return
    if not isinstance(value, torch.Tensor):
        raise MoKArgumentError(f"{name}: must be a tensor, is {type(value).__name__}")
    shape = value.shape
    if len(shape) != len(sizes) or any(w is not None and w != s for w, s in zip(sizes, shape, strict=True)):
        wanted = "[" + ", ".join("*" if size is None else str(size) for size in sizes) + "]"
        raise MoKArgumentError(f"{name}: shape {list(shape)} must be {wanted}")
    if value.layout != torch.strided:
        raise MoKArgumentError(f"{name}: layout {value.layout} must be dense (torch.strided)")
    if value.dtype not in dtypes:
        raise MoKArgumentError(f"{name}: dtype {value.dtype} must be {' or '.join(map(str, dtypes))}")
    if value.device != device:
        raise MoKArgumentError(f"{name}: device {value.device} must be {device}")


def _expert_matrices(
    name: str, value: object, workspace: MoKWorkspace, rows: int, cols: int, dtypes: tuple[torch.dtype, ...]
) -> list[torch.Tensor | None]:
    """E_local matrices [rows, cols] out of one tensor or a sequence; entries may be None."""
    experts = workspace.num_local_experts
    if isinstance(value, torch.Tensor):
        _check_tensor(name, value, (experts, rows, cols), dtypes, workspace.device)
        return list(value.unbind(0))
    if isinstance(value, torch.nn.ParameterList):
        value = list(value)
    if not isinstance(value, Sequence) or len(value) != experts:
        got = f"{len(value)} entries" if isinstance(value, Sequence) else type(value).__name__
        raise MoKArgumentError(f"{name}: must be a tensor or a sequence of {experts} tensors, one a local expert; is {got}")
    for index, matrix in enumerate(value):
        if matrix is not None:
            _check_tensor(f"{name}[{index}]", matrix, (rows, cols), dtypes, workspace.device)
    return list(value)


def _weights(call: Any, name: str, value: Any, workspace: MoKWorkspace, rows: int, cols: int) -> WeightArgument:
    """Checked weights; on the CPU one matrix an expert, on a GPU as they came: a call must not cost the host a loop where it need not."""
    on_device = workspace.executor is not None
    if on_device and are_good_weights(workspace, name, value, rows, cols):
        return value
    if on_device and isinstance(value, torch.Tensor):
        _check_tensor(name, value, (workspace.num_local_experts, rows, cols), (workspace.dtype,), workspace.device)
        call.new_weights.append((name, value))
        return value
    matrices = _expert_matrices(name, value, workspace, rows, cols, (workspace.dtype,))
    for index, matrix in enumerate(matrices):
        if matrix is None:
            raise MoKArgumentError(f"{name}[{index}]: must be a tensor, is None")
    if on_device:
        call.new_weights.append((name, matrices))
    return matrices


def _w13(call: Any, value: object, workspace: MoKWorkspace) -> WeightArgument:
    return _weights(call, "w13", value, workspace, 2 * workspace.intermediate_size, workspace.hidden_size)


def _w2(call: Any, value: object, workspace: MoKWorkspace) -> WeightArgument:
    return _weights(call, "w2", value, workspace, workspace.hidden_size, workspace.intermediate_size)


def _check_tokens(workspace: MoKWorkspace, schedule: object, x: torch.Tensor, router_weights: torch.Tensor, x_name: str = "x") -> None:
    if not isinstance(schedule, MoKSchedule):
        raise MoKArgumentError(f"schedule: must be a MoKSchedule, is {type(schedule).__name__}")
    wanted = (workspace.capacity_rows, workspace.num_local_experts, workspace.topk)
    if schedule.sizes != wanted:
        raise MoKArgumentError(f"schedule: is of another workspace: its rows, local experts and topk are {schedule.sizes}, must be {wanted}")
    if schedule.num_tokens > workspace.num_local_tokens:
        raise MoKArgumentError(
            f"schedule: is of another workspace: it has {schedule.num_tokens} tokens, must have at most num_local_tokens="
            f"{workspace.num_local_tokens}"
        )
    _check_tensor(x_name, x, (schedule.num_tokens, workspace.hidden_size), (workspace.dtype,), workspace.device)
    _check_tensor("router_weights", router_weights, (schedule.num_tokens, workspace.topk), (torch.float32,), workspace.device)


def build_schedule(workspace: MoKWorkspace, config: MoKConfig, topk_experts: torch.Tensor, *, tag: PassTag | None = None) -> MoKSchedule:
    """Gather every rank's routes and build this rank's schedule.

    Args:
        topk_experts: integer [T, K], global expert ids, -1 = no route; T may differ per rank and be 0.
        tag: layer and microbatch for messages.

    Raises (on every rank):
        MoKArgumentError: wrong shape or dtype, more tokens than the workspace allows, an id out of range or twice in a row.
        MoKCapacityError: a lowered schedule_capacity_multiplier leaves too few rows on some rank.
        MoKTimeoutError, MoKPeerError: a rank did not come, or refused.
    """
    with _call(workspace, config, CallKind.SCHEDULE, tag) as state:
        tokens = topk_experts.shape[0] if isinstance(topk_experts, torch.Tensor) and topk_experts.dim() == 2 else None
        _check_tensor("topk_experts", topk_experts, (tokens, workspace.topk), _INTEGERS, workspace.device)
        if tokens > workspace.num_local_tokens:
            raise MoKArgumentError(
                f"topk_experts: rank {workspace.rank} brings {tokens} tokens, must be at most num_local_tokens={workspace.num_local_tokens}"
            )
        if workspace.executor is not None:
            return device_schedule(workspace, state, topk_experts)
        return host_schedule(workspace, state, topk_experts)


def _new_context(workspace: MoKWorkspace) -> MoKContext:
    rows, inner = workspace.macrobatch_size, workspace.intermediate_size
    return MoKContext(
        torch.empty(rows, workspace.hidden_size, dtype=workspace.dtype, device=workspace.device),
        torch.empty(rows, 2 * inner, dtype=workspace.dtype, device=workspace.device),
    )


def forward(
    config: MoKConfig,
    workspace: MoKWorkspace,
    schedule: MoKSchedule,
    x: torch.Tensor,
    router_weights: torch.Tensor,
    w13: WeightArgument,
    w2: WeightArgument,
    *,
    save_context: bool = True,
    tag: PassTag | None = None,
) -> tuple[torch.Tensor, MoKContext | None]:
    """y[t] = sum over the routes k of token t of w2[e] (silu(gate) * up * p[t, k]) with [gate; up] = w13[e] x[t].

    Args:
        x: [T, H] in the workspace's dtype. router_weights: fp32 [T, K]; entries of -1 routes are ignored.
        w13: [E_local, 2I, H] or E_local tensors [2I, H], gate rows first. w2: [E_local, H, I] or E_local tensors [H, I].
        save_context: keep what `backward` needs; False under no_grad.

    Returns:
        y [T, H] and the context, None without save_context.

    Raises (on every rank): MoKArgumentError, MoKTimeoutError, MoKPeerError.
    """
    with _call(workspace, config, CallKind.FORWARD, tag) as state:
        _check_tokens(workspace, schedule, x, router_weights)
        w13, w2 = _w13(state, w13, workspace), _w2(state, w2, workspace)
        context = _new_context(workspace) if save_context else None
        if workspace.executor is not None:
            return device_forward(workspace, state, config, schedule, x, router_weights, w13, w2, context), context
        inputs = PassInputs(x, router_weights, w13, w2, context=context)
        return host_pass(workspace, state, Pass.FORWARD, schedule, inputs).tokens, context


def recompute_forward_context(
    config: MoKConfig,
    workspace: MoKWorkspace,
    schedule: MoKSchedule,
    x: torch.Tensor,
    router_weights: torch.Tensor,
    w13: WeightArgument,
    *,
    tag: PassTag | None = None,
) -> MoKContext:
    """The context that `forward` would have kept, bit for bit, for activation checkpointing. Arguments and errors as `forward`."""
    with _call(workspace, config, CallKind.RECOMPUTE, tag) as state:
        _check_tokens(workspace, schedule, x, router_weights)
        w13 = _w13(state, w13, workspace)
        context = _new_context(workspace)
        if workspace.executor is not None:
            device_recompute(workspace, state, config, schedule, x, router_weights, w13, context)
        else:
            host_pass(workspace, state, Pass.RECOMPUTE, schedule, PassInputs(x, router_weights, w13, context=context))
        return context


def _targets(name: str, grads: GradArgument, overwrite: object, workspace: MoKWorkspace, rows: int, cols: int) -> list[WeightGradTarget]:
    experts = workspace.num_local_experts
    if grads is None:
        return [WeightGradTarget(None, False)] * experts
    tensors = _expert_matrices(f"main_grads ({name})", grads, workspace, rows, cols, (torch.float32, torch.bfloat16))
    flags = [overwrite] * experts if isinstance(overwrite, bool) else overwrite
    if not isinstance(flags, Sequence) or len(flags) != experts or not all(isinstance(flag, bool) for flag in flags):
        raise MoKArgumentError(f"overwrite_main_grads ({name})={overwrite!r}: must be a bool or a sequence of {experts} bools")
    return [WeightGradTarget(tensor, flag) for tensor, flag in zip(tensors, flags, strict=True)]


def _pair_of_targets(workspace: MoKWorkspace, main_grads: Any, overwrite: Any) -> tuple[list[WeightGradTarget], list[WeightGradTarget]]:
    """Targets of w13 and of w2."""
    for name, pair in (("main_grads", main_grads), ("overwrite_main_grads", overwrite)):
        if not isinstance(pair, Sequence) or len(pair) != 2:
            got = f"{type(pair).__name__} of {len(pair)}" if isinstance(pair, Sequence) else type(pair).__name__
            raise MoKArgumentError(f"{name}: must be a pair, for w13 and for w2; is {got}")
    hidden, inner = workspace.hidden_size, workspace.intermediate_size
    return (
        _targets("w13", main_grads[0], overwrite[0], workspace, 2 * inner, hidden),
        _targets("w2", main_grads[1], overwrite[1], workspace, hidden, inner),
    )


def _check_apart(targets: Sequence[WeightGradTarget]) -> None:
    """Gradients are written expert by expert: no two of them may share memory."""
    tensors = [target.tensor for target in targets if target.tensor is not None]
    for tensor in tensors:
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            raise MoKArgumentError(f"main_grads: strides {tensor.stride()} must not be 0: elements would share memory")
    if len({tensor.data_ptr() for tensor in tensors}) != len(tensors):
        raise MoKArgumentError("main_grads: the gradients of two experts or of w13 and w2 start at one address, they must not share memory")


def _fresh_like(weights: WeightArgument) -> torch.Tensor | list[torch.Tensor]:
    if isinstance(weights, torch.Tensor):
        return torch.empty_like(weights)
    return [torch.empty_like(weight) for weight in weights]


def backward(
    config: MoKConfig,
    workspace: MoKWorkspace,
    schedule: MoKSchedule,
    ctx: MoKContext,
    dy: torch.Tensor,
    x: torch.Tensor,
    router_weights: torch.Tensor,
    w13: WeightArgument,
    w2: WeightArgument,
    *,
    main_grads: tuple[GradArgument, GradArgument] | None = None,
    overwrite_main_grads: tuple[OverwriteArgument, OverwriteArgument] = (False, False),
    tag: PassTag | None = None,
) -> tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor | list[torch.Tensor] | None,
    torch.Tensor | list[torch.Tensor] | None,
]:
    """Gradients of `forward`.

    Args:
        ctx: the context of `forward` or `recompute_forward_context` with the same arguments; it is only read.
        dy: [T, H]. Other operands as in `forward`.
        main_grads: for w13 and for w2: None (no gradient wanted), a tensor of all experts, or E_local tensors of which None takes no gradient;
            fp32 or bf16, of the weights' shapes. The gradient, summed in fp32, is added once; a bf16 tensor is rounded once.
        overwrite_main_grads: for w13 and for w2, a bool or one an expert: write over the tensor instead.

    Returns:
        dx [T, H], d_router_weights fp32 [T, K] (0 for -1 routes), dw13, dw2: new tensors in the weights' dtype, or None with main_grads.

    Raises (on every rank): MoKArgumentError, MoKTimeoutError, MoKPeerError.
    """
    with _call(workspace, config, CallKind.BACKWARD, tag) as state:
        _check_tokens(workspace, schedule, x, router_weights)
        hidden, inner = workspace.hidden_size, workspace.intermediate_size
        _check_tensor("dy", dy, (schedule.num_tokens, hidden), (workspace.dtype,), workspace.device)
        if not isinstance(ctx, MoKContext):
            raise MoKArgumentError(f"ctx: must be a MoKContext, is {type(ctx).__name__}")
        rows = workspace.macrobatch_size
        _check_tensor("ctx.x_rows", ctx.x_rows, (rows, hidden), (workspace.dtype,), workspace.device)
        _check_tensor("ctx.gate_up", ctx.gate_up, (rows, 2 * inner), (workspace.dtype,), workspace.device)
        checked13, checked2 = _w13(state, w13, workspace), _w2(state, w2, workspace)
        fresh = main_grads is None
        if fresh:
            main_grads, overwrite_main_grads = (_fresh_like(w13), _fresh_like(w2)), (True, True)
        words, targets = None, ((), ())
        if workspace.executor is not None:
            words = good_targets(workspace, main_grads, overwrite_main_grads)
        if words is None:
            targets = _pair_of_targets(workspace, main_grads, overwrite_main_grads)
            if not fresh:
                _check_apart([*targets[0], *targets[1]])
        dw13, dw2 = main_grads if fresh else (None, None)
        operands = (dy, x, router_weights, checked13, checked2)
        if workspace.executor is not None:
            return *device_backward(workspace, state, config, schedule, ctx, *operands, targets, words), dw13, dw2
        inputs = PassInputs(x, router_weights, checked13, checked2, dy, ctx, *targets)
        outputs = host_pass(workspace, state, Pass.BACKWARD, schedule, inputs)
        return outputs.tokens, outputs.d_router_weights, dw13, dw2
