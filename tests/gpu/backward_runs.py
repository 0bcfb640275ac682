"""Forward and backward of a group of ranks, for the tests of the backward megakernel."""

import dataclasses
from collections.abc import Sequence

import torch

from mok_megatron.executors.cpu import WeightGradTarget
from mok_megatron.executors.cuda_backward import grad_words
from mok_megatron.schedule import MoKContext
from tests.gpu import harness
from tests.gpu.harness import Group, Problem, expected, poison
from tests.oracle import assert_within

NAN = float("nan")


@dataclasses.dataclass
class Gradients:
    """On the CPU, of all ranks: dx [sum T, H], d_router_weights [sum T, K], dw13 [E, 2I, H], dw2 [E, H, I]."""

    dx: torch.Tensor
    d_router_weights: torch.Tensor
    dw13: torch.Tensor
    dw2: torch.Tensor

    def names(self) -> list[str]:
        return [field.name for field in dataclasses.fields(self)]


def check_gradients(problem: Problem, dys: list[torch.Tensor], got: Gradients, grad_dtype: torch.dtype) -> None:
    """Every element within the bounds of the FP64 oracle; exactly 0 for the weights of absent routes."""
    want = expected(problem, dys, grad_dtype=grad_dtype)
    for name in got.names():
        assert_within(name, getattr(got, name), getattr(want, name))
    assert not got.d_router_weights[torch.cat(problem.topk_experts) < 0].any()


def assert_same(one: Gradients, other: Gradients, what: object) -> None:
    for name in one.names():
        assert_same_bits(name, getattr(one, name), getattr(other, name), what)


def assert_same_bits(name: str, one: torch.Tensor, other: torch.Tensor, what: object) -> None:
    """In every bit: 0.0 and -0.0 differ, and so do two NaNs of other bits."""
    a, b = (t.contiguous().view(torch.int16 if t.element_size() == 2 else torch.int32) for t in (one, other))
    assert torch.equal(a, b), f"{name} differs in {int((a != b).sum())} of {a.numel()} elements: {what}"


def group_for(problem: Problem, **options) -> Group:
    """A group whose buffers fit the problem. Options as of Group."""
    hidden, inner = problem.w2.shape[1:]
    tokens = max(x.shape[0] for x in problem.x)
    return Group(len(problem.x), tokens, problem.topk_experts[0].shape[1], hidden, inner, problem.w13.shape[0], **options)


def split_problem(problem: Problem, tokens: list[int]) -> Problem:
    """The problem of one rank as that of ranks which bring so many tokens each."""
    x, weights, routes = (list(t.split(tokens)) for t in (problem.x[0], problem.router_weights[0], problem.topk_experts[0]))
    return Problem(x, weights, routes, problem.w13, problem.w2)


def random_dy(problem: Problem, seed: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(x.shape, generator=g).bfloat16() for x in problem.x]


def poison_backward_memory(group: Group) -> None:
    """NaN in everything that the backward may read before it has written it."""

    def fill(_: int, executor) -> None:
        assert executor._backward
        memory = executor._backward_memory
        for tensor in (memory.dy, memory.gate_up, memory.d_gate_up, memory.partials):
            poison(tensor)
        memory.scratch.fill_(0xFF)
        memory.records.fill_(0xFF)
        poison(executor.ring_x)

    group.each(fill)
    group.synchronize_devices()
    for memory in group.memory:
        for tensor in (memory.combine, memory.x, memory.dy, memory.d_router_weights):
            poison(tensor)
    group.synchronize_devices()


def words_of(targets: Sequence[Sequence[WeightGradTarget]]) -> list[list[int]]:
    return [grad_words(name, part) for name, part in zip(("main_grads (w13)", "main_grads (w2)"), targets, strict=True)]


class Pass:
    """A problem placed on the ranks of a group, with the forward done."""

    def __init__(self, group: Group, problem: Problem, dys: list[torch.Tensor], *, split: bool = False) -> None:
        self.group, self.problem = group, problem
        self.outputs, self.contexts, self.schedules = group.forward(problem, save=True)
        local = group.local
        self.operands = []
        for rank, device in enumerate(group.devices):
            w13, w2 = (w[rank * local : (rank + 1) * local].to(device) for w in (problem.w13, problem.w2))
            if split:
                w13, w2 = [w.clone() for w in w13], [w.clone() for w in w2]
            self.operands.append((dys[rank].to(device), problem.x[rank].to(device), problem.router_weights[rank].to(device), w13, w2))
        group.synchronize_devices()

    def new_grads(self, dtype: torch.dtype, value: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
        local = self.group.local
        return [
            tuple(torch.full((local, *w.shape[1:]), value, dtype=dtype, device=device) for w in (self.problem.w13, self.problem.w2))
            for device in self.group.devices
        ]

    def recompute(self) -> list[MoKContext]:
        made = []
        for context in self.contexts:
            made.append(MoKContext(poison(torch.empty_like(context.x_rows)), poison(torch.empty_like(context.gate_up))))
        self.group.synchronize_devices()
        self.group.each(
            lambda rank, executor: executor.recompute(
                self.schedules[rank],
                *self.operands[rank][1:4],
                context=made[rank],
                timeout_seconds=harness.TIMEOUT_SECONDS,
                sm_reserve=self.group.sm_reserve,
            )
        )
        self.finish()
        return made

    def words(self, grads, overwrite: bool) -> list[list[int]]:
        """Of one rank's gradients of w13 and of w2, as the kernels take them."""
        return words_of([[WeightGradTarget(matrix, overwrite) for matrix in tensor] for tensor in grads])

    def launch(self, grads, overwrite: bool, targets=None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The backward of every rank, on its stream. Nobody waits: returns dx and d_router_weights of every rank, not yet computed."""
        return self.group.each(
            lambda rank, executor: executor.backward(
                self.schedules[rank],
                self.contexts[rank],
                *self.operands[rank],
                *(self.words(grads[rank], overwrite) if targets is None else words_of(targets[rank])),
                timeout_seconds=harness.TIMEOUT_SECONDS,
                sm_reserve=self.group.sm_reserve,
            )
        )

    def backward(self, grads, overwrite: bool, targets=None) -> Gradients:
        """Into `grads` of every rank."""
        self.group.synchronize_devices()
        results = self.launch(grads, overwrite, targets)
        self.finish()
        return Gradients(
            torch.cat([dx.cpu() for dx, _ in results]),
            torch.cat([dp.cpu() for _, dp in results]),
            torch.cat([g13.cpu() for g13, _ in grads]),
            torch.cat([g2.cpu() for _, g2 in grads]),
        )

    def finish(self) -> None:
        self.group.synchronize()
        faults = self.group.faults()
        if any(fault[0] for fault in faults):
            raise RuntimeError(f"faults: {faults}")
