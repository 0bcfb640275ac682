"""Public functions: build_schedule, forward, recompute_forward_context, backward over a workspace. No autograd graph is built here.

Every function is a collective call of the workspace's group: all ranks make the same calls in the same order, with any number of tokens each.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from mok_megatron.config import MoKConfig
from mok_megatron.device_calls import device_backward, device_call, device_forward, device_recompute, device_schedule
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


def _call(workspace: MoKWorkspace, config: MoKConfig, kind: CallKind, tag: PassTag | None) -> contextlib.AbstractContextManager[Any]:
    """One numbered call: what fails inside it on one rank is raised on all of them."""
    if not isinstance(workspace, MoKWorkspace):
        # Without a workspace there is no group to tell; the order of the arguments is not the same in all functions.
        raise MoKArgumentError(f"workspace: must be a MoKWorkspace, is {type(workspace).__name__}")
    if workspace.device.type == "cuda":
        return device_call(workspace, config, kind, tag)
    return host_call(workspace, config, kind, tag)


def _check_tensor(name: str, value: object, sizes: Sequence[int | None], dtypes: Sequence[torch.dtype], device: torch.device) -> None:
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
    name: str, value: object, workspace: MoKWorkspace, rows: int, cols: int, dtypes: Sequence[torch.dtype]
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
    shape, device = torch.Size((rows, cols)), workspace.device
    for index, matrix in enumerate(value):
        # Up to 512 matrices a call: one look at each, and the full check for what does not pass it.
        good = isinstance(matrix, torch.Tensor) and matrix.shape == shape and matrix.dtype in dtypes and matrix.device == device
        if not good and matrix is not None:
            _check_tensor(f"{name}[{index}]", matrix, (rows, cols), dtypes, device)
    return list(value)


def _weights(name: str, value: object, workspace: MoKWorkspace, rows: int, cols: int) -> WeightArgument:
    """Checked weights; on the CPU one matrix an expert, on a GPU as they came: a call must not cost the host a loop where it need not."""
    if workspace.device.type == "cuda" and isinstance(value, torch.Tensor):
        _check_tensor(name, value, (workspace.num_local_experts, rows, cols), (workspace.dtype,), workspace.device)
        return value
    matrices = _expert_matrices(name, value, workspace, rows, cols, (workspace.dtype,))
    for index, matrix in enumerate(matrices):
        if matrix is None:
            raise MoKArgumentError(f"{name}[{index}]: must be a tensor, is None")
    return matrices


def _w13(value: object, workspace: MoKWorkspace) -> WeightArgument:
    return _weights("w13", value, workspace, 2 * workspace.intermediate_size, workspace.hidden_size)


def _w2(value: object, workspace: MoKWorkspace) -> WeightArgument:
    return _weights("w2", value, workspace, workspace.hidden_size, workspace.intermediate_size)


def _check_tokens(workspace: MoKWorkspace, schedule: object, x: torch.Tensor, router_weights: torch.Tensor, x_name: str = "x") -> None:
    if not isinstance(schedule, MoKSchedule):
        raise MoKArgumentError(f"schedule: must be a MoKSchedule, is {type(schedule).__name__}")
    made_for = (schedule.row_source_rank.shape[0], schedule.expert_rows.shape[0], schedule.topk_experts.shape[1])
    if made_for != (workspace.capacity_rows, workspace.num_local_experts, workspace.topk):
        raise MoKArgumentError(
            f"schedule: is of another workspace: its rows, local experts and topk are {made_for}, must be "
            f"{(workspace.capacity_rows, workspace.num_local_experts, workspace.topk)}"
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
        integers = (torch.int32, torch.int64, torch.int16, torch.uint8, torch.int8)
        _check_tensor("topk_experts", topk_experts, (None, workspace.topk), integers, workspace.device)
        tokens = topk_experts.shape[0]
        if tokens > workspace.num_local_tokens:
            raise MoKArgumentError(
                f"topk_experts: rank {workspace.rank} brings {tokens} tokens, must be at most num_local_tokens={workspace.num_local_tokens}"
            )
        if workspace.device.type == "cuda":
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
        inputs = PassInputs(x, router_weights, _w13(w13, workspace), _w2(w2, workspace))
        inputs.context = _new_context(workspace) if save_context else None
        if workspace.device.type == "cuda":
            return device_forward(workspace, state, config, schedule, inputs), inputs.context
        return host_pass(workspace, state, Pass.FORWARD, schedule, inputs).tokens, inputs.context


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
        inputs = PassInputs(x, router_weights, _w13(w13, workspace), context=_new_context(workspace))
        if workspace.device.type == "cuda":
            device_recompute(workspace, state, config, schedule, inputs)
            return inputs.context
        host_pass(workspace, state, Pass.RECOMPUTE, schedule, inputs)
        return inputs.context


def _targets(name: str, grads: GradArgument, overwrite: object, workspace: MoKWorkspace, rows: int, cols: int) -> list[WeightGradTarget]:
    experts = workspace.num_local_experts
    if grads is None:
        return [WeightGradTarget(None, False)] * experts
    tensors = _expert_matrices(f"main_grads ({name})", grads, workspace, rows, cols, (torch.float32, torch.bfloat16))
    flags = [overwrite] * experts if isinstance(overwrite, bool) else overwrite
    if not isinstance(flags, Sequence) or len(flags) != experts or not all(isinstance(flag, bool) for flag in flags):
        raise MoKArgumentError(f"overwrite_main_grads ({name})={overwrite!r}: must be a bool or a sequence of {experts} bools")
    return [WeightGradTarget(tensor, flag) for tensor, flag in zip(tensors, flags, strict=True)]


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
        inputs = PassInputs(x, router_weights, _w13(w13, workspace), _w2(w2, workspace), dy, ctx)
        fresh = main_grads is None
        if fresh:
            main_grads, overwrite_main_grads = (_fresh_like(w13), _fresh_like(w2)), (True, True)
        for name, pair in (("main_grads", main_grads), ("overwrite_main_grads", overwrite_main_grads)):
            if not isinstance(pair, Sequence) or len(pair) != 2:
                got = f"{type(pair).__name__} of {len(pair)}" if isinstance(pair, Sequence) else type(pair).__name__
                raise MoKArgumentError(f"{name}: must be a pair, for w13 and for w2; is {got}")
        inputs.grads13 = _targets("w13", main_grads[0], overwrite_main_grads[0], workspace, 2 * inner, hidden)
        inputs.grads2 = _targets("w2", main_grads[1], overwrite_main_grads[1], workspace, hidden, inner)
        if not fresh:
            _check_apart([*inputs.grads13, *inputs.grads2])
        dw13, dw2 = main_grads if fresh else (None, None)
        if workspace.device.type == "cuda":
            return *device_backward(workspace, state, config, schedule, inputs), dw13, dw2
        outputs = host_pass(workspace, state, Pass.BACKWARD, schedule, inputs)
        return outputs.tokens, outputs.d_router_weights, dw13, dw2
