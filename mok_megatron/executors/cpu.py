"""CPU executor: walks the task stream of a pass, doing each task's arithmetic in torch on fixed tiles.

It rounds where the kernels round and sums in their order. Every product has the shape of its tile whatever the routing is: a library's matrix
product of another shape may add in another order, and bits would then depend on how many rows an expert has. Operands are copied to fresh,
aligned fp32 memory for the same reason.

A pass is written as generators that yield at every wait, so that a scheduler can interleave workers and ranks; `drive` runs one worker through
the total order.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Generator, Iterator, Sequence
from typing import Any, TypeVar

import torch

from mok_megatron import ops
from mok_megatron.ops import Pass, PassShape, PeerWait, Stream, Task, TaskKind
from mok_megatron.protocol import CallState, Flag, FlagWait, Steps, poll
from mok_megatron.schedule import MoKContext, MoKSchedule
from mok_megatron.workspace import MoKWorkspace, SymmetricBuffers

TILES = ops.tile_sizes()
Result = TypeVar("Result")
Weights = Sequence[torch.Tensor]
"""E_local matrices, gate rows over up rows for w13."""


@dataclasses.dataclass
class WeightGradTarget:
    """Where an expert's weight gradient goes: added to `tensor`, or written over it. None = no gradient wanted."""

    tensor: torch.Tensor | None
    overwrite: bool


@dataclasses.dataclass
class PassInputs:
    """Operands of a pass; those that its kind does not use are None.

    x, dy: [T, H]; router_weights: fp32 [T, K]; w13: E_local of [2I, H]; w2: E_local of [H, I]; context: read by the backward, written by the
    others (None: nothing is kept); grads13, grads2: E_local targets.
    """

    x: torch.Tensor
    router_weights: torch.Tensor
    w13: Weights
    w2: Weights | None = None
    dy: torch.Tensor | None = None
    context: MoKContext | None = None
    grads13: Sequence[WeightGradTarget] = ()
    grads2: Sequence[WeightGradTarget] = ()


@dataclasses.dataclass
class PassOutputs:
    """tokens: y or dx, [T, H]; d_router_weights: fp32 [T, K] of the backward."""

    tokens: torch.Tensor | None = None
    d_router_weights: torch.Tensor | None = None


@dataclasses.dataclass
class CounterWaits:
    """Wait for a task's local counters."""

    counters: list[int]
    task: Task

    def ready(self) -> bool:
        return all(all(value >= wait.target for value in self.counters[wait.first : wait.first + wait.count]) for wait in self.task.waits)


def _silu_parts(gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """sigmoid(gate) and silu(gate), fp32. Forward and backward share it: the backward recomputes h bit for bit."""
    sigmoid = torch.sigmoid(gate)
    return sigmoid, gate * sigmoid


def activation(gate: torch.Tensor, up: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up * p in fp32: [rows, columns] of rounded gate and up, weights fp32 [rows]."""
    return _silu_parts(gate)[1] * up * weights[:, None]


def activation_grad(
    gate: torch.Tensor, up: torch.Tensor, weights: torch.Tensor, dh: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """SwiGLU backward in fp32: (h, d_gate, d_up, per-row d_p over these columns).

    d_p = sum_i dh_i * silu(gate_i) * up_i comes straight from dh, without a division by p: exact at p = 0.
    """
    sigmoid, silu = _silu_parts(gate)
    unweighted = silu * up
    d_weights = (dh * unweighted).sum(dim=1)
    d_act = dh * weights[:, None]
    d_silu = sigmoid * (1 + gate * (1 - sigmoid))
    return unweighted * weights[:, None], d_act * up * d_silu, d_act * silu, d_weights


def _fp32(tensor: torch.Tensor) -> torch.Tensor:
    """A fresh contiguous fp32 copy."""
    return torch.empty(tensor.shape, dtype=torch.float32, device="cpu").copy_(tensor)


def _zeros(*sizes: int) -> torch.Tensor:
    """fp32 on the CPU, whatever torch's defaults are."""
    return torch.zeros(*sizes, dtype=torch.float32, device="cpu")


def _span(index: int, width: int, total: int) -> slice:
    return slice(index * width, min((index + 1) * width, total))


class CpuPass:
    """One rank's side of one pass.

    `enter`, `work` per task and `leave` are generators: they yield a Wait, which must be over before they are resumed, or None between the
    reading and the writing part of a task.
    """

    def __init__(
        self,
        workspace: MoKWorkspace,
        schedule: MoKSchedule,
        state: CallState,
        kind: Pass,
        inputs: PassInputs,
    ) -> None:
        self.workspace = workspace
        self.schedule = schedule
        self.state = state
        self.kind = kind
        self.inputs = inputs
        self.outputs = PassOutputs()
        shape = workspace.shape
        self.hidden, self.inner = shape.hidden_size, shape.intermediate_size
        self.shape = PassShape(
            kind,
            workspace.rank,
            workspace.ep_size,
            schedule.num_tokens,
            self.hidden,
            self.inner,
            shape.num_local_experts,
            workspace.minibatch_size // TILES.block_rows,
            workspace.macrobatch_size // TILES.block_rows,
            workspace.capacity_rows // TILES.block_rows,
        )
        self.compute = ops.task_stream(schedule.expert_row_offsets, self.shape, Stream.COMPUTE)
        self.comm = ops.task_stream(schedule.expert_row_offsets, self.shape, Stream.COMM)
        self.counters = [0] * self.compute.num_counters
        rings, context = workspace.rings, inputs.context
        writes_context = kind != Pass.BACKWARD and context is not None
        # The forward's ring is the context itself: macrobatches are walked last to first, so what stays in it is the first one's.
        self.ring_x = context.x_rows if writes_context else rings.x
        self.ring_gate_up = context.gate_up if writes_context else rings.gate_up
        self._perform = {
            TaskKind.DISPATCH: self._dispatch,
            TaskKind.DISPATCH_DY: self._dispatch,
            TaskKind.GEMM1: self._gemm1,
            TaskKind.GEMM2: self._gemm2,
            TaskKind.DGRAD2: self._dgrad2,
            TaskKind.DGRAD1: self._dgrad1,
            TaskKind.WGRAD2: self._wgrad,
            TaskKind.WGRAD13: self._wgrad,
            TaskKind.ZERO: self._zero,
            TaskKind.SIGNAL_DONE: self._signal_done,
            TaskKind.REDUCE: self._reduce,
        }

    @functools.cached_property
    def tasks(self) -> list[Task]:
        """Both ticket sequences in the total order."""
        return sorted(self.compute.tasks + self.comm.tasks, key=lambda task: task.order)

    # --- protocol -------------------------------------------------------------------------------------------------------------------

    def enter(self) -> Steps:
        """Put the inputs into the symmetric buffers and say so. Also x and the weights in the backward: a replay fetches them again."""
        mine, tokens = self.workspace.mine, self.schedule.num_tokens
        mine.x[:tokens] = self.inputs.x
        mine.router_weights[:tokens] = self.inputs.router_weights
        if self.kind == Pass.BACKWARD:
            mine.dy[:tokens] = self.inputs.dy
        if self.kind != Pass.RECOMPUTE:
            self.outputs.tokens = torch.empty(tokens, self.hidden, dtype=self.workspace.dtype, device="cpu")
        if self.kind == Pass.BACKWARD:
            self.outputs.d_router_weights = _zeros(tokens, self.workspace.topk)
        yield None
        self.signal_entered()

    def signal_entered(self) -> None:
        self.state.protocol.signal_entered(self.state.call, self.state.kind, self.state.tag)

    def work(self, task: Task) -> Steps:
        """Wait for a task's conditions, do it, announce it."""
        if task.peer_wait == PeerWait.ENTERED:
            yield FlagWait(self.state, Flag.ENTERED, self._source_ranks(task))
        elif task.peer_wait == PeerWait.DONE:
            yield FlagWait(self.state, Flag.DONE, range(self.workspace.ep_size))
        if task.waits:
            yield CounterWaits(self.counters, task)
        yield from self._perform[task.kind](task)
        for counter in task.bumps:
            self.counters[counter] += 1

    def leave(self) -> Steps:
        """The pass ends when every peer is done with this rank's memory."""
        yield FlagWait(self.state, Flag.DONE, range(self.workspace.ep_size))

    def run(self) -> Generator[FlagWait | CounterWaits | None, None, PassOutputs]:
        """One worker, all tasks in the total order."""
        yield from self.enter()
        for task in self.tasks:
            yield from self.work(task)
        yield from self.leave()
        return self.outputs

    # --- tasks ----------------------------------------------------------------------------------------------------------------------

    def _source_ranks(self, task: Task) -> list[int]:
        ranks = self.schedule.row_source_rank[task.first_row : task.first_row + task.num_rows].tolist()
        return sorted(set(ranks) - {-1})

    def _ring_rows(self, block: int, num_blocks: int = 1) -> slice:
        return slice(block * TILES.block_rows, (block + num_blocks) * TILES.block_rows)

    def _dispatch(self, task: Task) -> Steps:
        """Pull rows, and their router weights, from their source ranks; padding rows become zeros, since weight gradients read them."""
        first, count = task.first_row, task.num_rows
        ranks = self.schedule.row_source_rank[first : first + count]
        slots = self.schedule.row_source_slot[first : first + count]
        backward = task.kind == TaskKind.DISPATCH_DY
        rows = torch.zeros(count, self.hidden, dtype=self.workspace.dtype, device="cpu")
        weights = _zeros(count)
        for source in self._source_ranks(task):
            here = ranks == source
            slot = slots[here].long()
            buffers = self.workspace.buffers[source]
            rows[here] = (buffers.dy if backward else buffers.x)[slot // self.workspace.topk]
            weights[here] = buffers.router_weights.view(-1)[slot]
        yield None
        at = task.ring_block * TILES.block_rows + first % TILES.block_rows
        (self.workspace.rings.dy if backward else self.ring_x)[at : at + count] = rows
        if backward or self.kind != Pass.BACKWARD:
            # A replay needs no weights: dy's fetch, which has its own counter, brings them.
            self.workspace.rings.router_weights[at : at + count] = weights

    def _gemm1(self, task: Task) -> Steps:
        rows, cols = self._ring_rows(task.ring_block), _span(task.tile_n, TILES.gate_up_cols, self.inner)
        x = _fp32(self.ring_x[rows])
        w13 = self.inputs.w13[task.expert]
        gate = (x @ _fp32(w13[cols]).t()).to(self.workspace.dtype)
        up_cols = slice(self.inner + cols.start, self.inner + cols.stop)
        up = (x @ _fp32(w13[up_cols]).t()).to(self.workspace.dtype)
        if self.kind == Pass.FORWARD:
            h = activation(_fp32(gate), _fp32(up), self.workspace.rings.router_weights[rows])
        yield None
        self.ring_gate_up[rows, cols] = gate
        self.ring_gate_up[rows, up_cols] = up
        if self.kind == Pass.FORWARD:
            self.workspace.rings.activation[rows, cols] = h.to(self.workspace.dtype)

    def _push_rows(self, task: Task, select: str, cols: slice | None, values: torch.Tensor) -> None:
        """Write rows of a block to the source ranks' slots of a symmetric buffer; padding rows go nowhere."""
        first = task.block * TILES.block_rows
        ranks = self.schedule.row_source_rank[first : first + TILES.block_rows]
        slots = self.schedule.row_source_slot[first : first + TILES.block_rows]
        for source in sorted(set(ranks.tolist()) - {-1}):
            here = ranks == source
            target: torch.Tensor = getattr(self.workspace.buffers[source], select)
            if cols is None:
                target[slots[here].long()] = values[here]
            else:
                target[slots[here].long(), cols] = values[here]

    def _gemm2(self, task: Task) -> Steps:
        cols = _span(task.tile_n, TILES.hidden_cols, self.hidden)
        h = _fp32(self.workspace.rings.activation[self._ring_rows(task.ring_block)])
        y = (h @ _fp32(self.inputs.w2[task.expert][cols]).t()).to(self.workspace.dtype)
        yield None
        self._push_rows(task, "combine", cols, y)

    def _dgrad2(self, task: Task) -> Steps:
        rings, dtype = self.workspace.rings, self.workspace.dtype
        rows, cols = self._ring_rows(task.ring_block), _span(task.tile_n, TILES.activation_grad_cols, self.inner)
        gate_up = self.inputs.context.gate_up if task.macrobatch == 0 else rings.gate_up
        up_cols = slice(self.inner + cols.start, self.inner + cols.stop)
        dh = _fp32(rings.dy[rows]) @ _fp32(self.inputs.w2[task.expert][:, cols])
        weights = rings.router_weights[rows]
        h, d_gate, d_up, d_weights = activation_grad(_fp32(gate_up[rows, cols]), _fp32(gate_up[rows, up_cols]), weights, dh)
        yield None
        rings.activation[rows, cols] = h.to(dtype)
        rings.d_gate_up[rows, cols] = d_gate.to(dtype)
        rings.d_gate_up[rows, up_cols] = d_up.to(dtype)
        rings.d_router_weights[rows, task.tile_n] = d_weights

    def _dgrad1(self, task: Task) -> Steps:
        rows, cols = self._ring_rows(task.ring_block), _span(task.tile_n, TILES.hidden_cols, self.hidden)
        d_gate_up = _fp32(self.workspace.rings.d_gate_up[rows])
        dx = (d_gate_up @ _fp32(self.inputs.w13[task.expert][:, cols])).to(self.workspace.dtype)
        partials = self.workspace.rings.d_router_weights[rows].clone()
        yield None
        self._push_rows(task, "combine", cols, dx)
        if task.tile_n == 0:
            d_weights = partials[:, 0]
            for tile in range(1, partials.shape[1]):
                d_weights = d_weights + partials[:, tile]
            self._push_rows(task, "d_router_weights", None, d_weights)

    def _wgrad(self, task: Task) -> Steps:
        """One tile of a weight gradient: fp32 over the expert's rows in schedule order, block by block."""
        second = task.kind == TaskKind.WGRAD2
        rings = self.workspace.rings
        if second:
            left, right, scratch = rings.dy, rings.activation, rings.wgrad2
            target = self.inputs.grads2[task.expert]
            m, n = _span(task.tile_m, TILES.wgrad_rows, self.hidden), _span(task.tile_n, TILES.wgrad_cols, self.inner)
        else:
            left, scratch = rings.d_gate_up, rings.wgrad13
            right = self.inputs.context.x_rows if task.macrobatch == 0 else rings.x
            target = self.inputs.grads13[task.expert]
            m, n = (
                _span(task.tile_m, TILES.wgrad_rows, 2 * self.inner),
                _span(task.tile_n, TILES.wgrad_cols, self.hidden),
            )
        if target.tensor is None:
            return
        total = scratch[m, n].clone() if task.continues else _zeros(m.stop - m.start, n.stop - n.start)
        for block in range(task.first_block, task.first_block + task.num_blocks):
            rows = self._ring_rows(block % self.shape.macrobatch_blocks)
            total = total + _fp32(left[rows, m].t()) @ _fp32(right[rows, n])
        yield None
        if task.continued:
            scratch[m, n] = total
        elif target.overwrite:
            target.tensor[m, n] = total.to(target.tensor.dtype)
        else:
            target.tensor[m, n] = (target.tensor[m, n].float() + total).to(target.tensor.dtype)

    def _zero(self, task: Task) -> Steps:
        """An expert without rows: zeros where its gradient is overwritten, nothing where it is accumulated."""
        second = task.first_block == 0
        target = (self.inputs.grads2 if second else self.inputs.grads13)[task.expert]
        yield None
        if target.tensor is not None and target.overwrite:
            height, width = target.tensor.shape
            target.tensor[_span(task.tile_m, TILES.wgrad_rows, height), _span(task.tile_n, TILES.wgrad_cols, width)] = 0

    def _signal_done(self, task: Task) -> Steps:
        yield None
        self.state.protocol.signal_done(self.state.call)

    def _reduce(self, task: Task) -> Steps:
        """Sum of a token's K rows in ascending slot order, fp32, one rounding. Slots without a route are masked, not multiplied by zero."""
        tokens = slice(task.first_row, task.first_row + task.num_rows)
        topk = self.workspace.topk
        slots = slice(tokens.start * topk, tokens.stop * topk)
        mine: SymmetricBuffers = self.workspace.mine
        routed = self.schedule.topk_experts[tokens] >= 0
        rows = mine.combine[slots].view(-1, topk, self.hidden)
        total = _zeros(task.num_rows, self.hidden)
        for slot in range(topk):
            total = torch.where(routed[:, slot, None], total + rows[:, slot].float(), total)
        yield None
        self.outputs.tokens[tokens] = total.to(self.workspace.dtype)
        if self.kind == Pass.BACKWARD:
            d_weights = mine.d_router_weights[slots].view(-1, topk)
            self.outputs.d_router_weights[tokens] = torch.where(routed, d_weights, 0.0)


@contextlib.contextmanager
def _fixed_arithmetic() -> Iterator[None]:
    """No graph, one thread, full fp32 products: neither the number of threads nor what the caller has set may change a bit."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


def exchange_routes(
    workspace: MoKWorkspace, state: CallState, routes: torch.Tensor
) -> Generator[FlagWait | None, None, tuple[torch.Tensor, torch.Tensor]]:
    """Show this rank's routes, int32 [T, K], to the group. Returns everybody's, int32 [EP, T_max, K], and their T, int64 [EP].

    The buffers alternate with the call's parity: a peer that still reads the last exchange's is not disturbed, and nobody enters a third one
    before it has entered this one, which it does after reading.
    """
    parity = state.call % 2
    workspace.mine.topk_experts[parity, : routes.shape[0]] = routes
    workspace.mine.num_tokens[parity] = routes.shape[0]
    yield None
    state.protocol.signal_entered(state.call, state.kind, state.tag)
    yield FlagWait(state, Flag.ENTERED, range(workspace.ep_size))
    num_tokens = torch.stack([peer.num_tokens[parity] for peer in workspace.buffers])
    return torch.stack([peer.topk_experts[parity] for peer in workspace.buffers]), num_tokens


def drive(steps: Generator[Any, None, Result], limit_seconds: float) -> Result:
    """Run one worker to its end, blocking at every wait. Returns what the generator returns.

    Raises:
        MoKTimeoutError, MoKPeerError: see protocol.poll.
        AssertionError: a local counter is not there in the total order, which no input can cause.
    """
    with _fixed_arithmetic():
        while True:
            try:
                wait = next(steps)
            except StopIteration as stop:
                return stop.value
            if isinstance(wait, FlagWait):
                poll(wait, limit_seconds)
            elif wait is not None:
                assert wait.ready(), f"task {wait.task} waits for a counter that no earlier task raises"
