"""Expert-parallel groups in one process: ranks on one GPU (each on a stream and a share of the SMs) or one rank a GPU.

Kernels of all ranks run at the same time and see each other's memory by plain addresses, as over symmetric memory, so the
protocol between ranks is tested without a launcher.
"""

import ctypes
import dataclasses
import os
from typing import Any

import torch

from mok_megatron.executors.cuda import CudaExecutor, ExecutorShape, RankMemory, bind
from mok_megatron.protocol import ROW_WORDS, Flag
from mok_megatron.schedule import MoKContext, MoKSchedule
from mok_megatron.workspace import WorkspaceShape
from tests.oracle import moe_oracle

TIMEOUT_SECONDS = 5.0
LATER_CALL = 2**40


def library() -> ctypes.CDLL | None:
    """A library of kernels alone, when MOK_TEST_KERNELS names one; None: the package's."""
    path = os.environ.get("MOK_TEST_KERNELS")
    return bind(ctypes.CDLL(path)) if path else None


@dataclasses.dataclass
class Problem:
    """Inputs of all ranks and weights of all experts, on the CPU."""

    x: list[torch.Tensor]
    router_weights: list[torch.Tensor]
    topk_experts: list[torch.Tensor]
    w13: torch.Tensor
    w2: torch.Tensor


def random_problem(tokens: list[int], hidden: int, inner: int, experts: int, topk: int, *, seed: int, missing: float = 0.0) -> Problem:
    """Normal inputs, weights scaled by fan-in, softmax router weights, distinct experts in ascending order; some routes missing."""
    g = torch.Generator().manual_seed(seed)
    xs, ps, routes = [], [], []
    for count in tokens:
        xs.append(torch.randn(count, hidden, generator=g).bfloat16())
        scores = torch.rand(count, experts, generator=g)
        ids = scores.topk(topk, dim=1).indices.sort(dim=1).values.int() if count else torch.empty(0, topk).int()
        ids = torch.where(torch.rand(count, topk, generator=g) < missing, -1, ids)
        routes.append(ids.contiguous())
        ps.append(torch.softmax(torch.randn(count, topk, generator=g), dim=1))
    w13 = (torch.randn(experts, 2 * inner, hidden, generator=g) * hidden**-0.5).bfloat16()
    w2 = (torch.randn(experts, hidden, inner, generator=g) * inner**-0.5).bfloat16()
    return Problem(xs, ps, routes, w13, w2)


def expected(problem: Problem, dys: list[torch.Tensor] | None = None, **options: Any) -> Any:
    """The FP64 oracle's results for the tokens of all ranks, in their order; with `dys`, gradients too."""
    tokens = (torch.cat(part) for part in (problem.x, problem.router_weights, problem.topk_experts))
    return moe_oracle(*tokens, problem.w13, problem.w2, *([] if dys is None else [torch.cat(dys)]), dtype=torch.bfloat16, **options)


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """NaN in every element of a floating-point tensor."""
    return tensor.fill_(float("nan"))


def enter_for_rank_1(group: "Group") -> None:
    """Rank 0 finds rank 1 in every later pass, whose inputs lie there from the pass before; its end it never sees."""
    group.memory[0].flags[1, Flag.ENTERED] = LATER_CALL
    group.synchronize_devices()


def assert_rank_1_is_named(group: "Group", entered: bool) -> None:
    """After a pass of rank 0 alone, with a limit of 0.5 s."""
    code, phase, call, rank, missing, expected, seen, waited = group.faults()[0][:8]
    # Clusters without work wait for the end from the start, which this rank has not reached either: that wait is the longer one.
    assert (code, phase, rank, missing) == (1, 1 if entered else 0, 0, 0b10)
    assert seen < expected == call
    assert (2e9 if entered else 0.5e9) <= waited < (4e9 if entered else 2e9)


class Group:
    """EP ranks of one process."""

    def __init__(
        self,
        ep_size: int,
        num_local_tokens: int,
        topk: int,
        hidden: int,
        inner: int,
        experts: int,
        *,
        minibatch: int | None = None,
        macrobatch: int | None = None,
        capacity: float = 1.0,
        devices: list[int] | None = None,
    ) -> None:
        self.devices = [torch.device("cuda", i) for i in (devices or [0] * ep_size)]
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        ranks_a_device = max(self.devices.count(d) for d in self.devices)
        # Ranks that share a GPU must all be resident at once.
        self.sm_reserve = 0 if ranks_a_device == 1 else sms - sms // ranks_a_device // 2 * 2
        local = experts // ep_size
        shape = WorkspaceShape(ep_size, num_local_tokens, hidden, topk, local, inner, torch.bfloat16, minibatch, macrobatch, capacity)
        self.minibatch, self.macrobatch = shape.ring(sms)
        self.capacity = shape.capacity_rows
        self.shape, self.local = shape, local
        self.streams = [torch.cuda.Stream(d) for d in self.devices]
        for first in set(self.devices):
            for second in set(self.devices) - {first}:
                # A copy makes torch open the peer's memory to this device's kernels.
                torch.zeros(1, device=first).to(second)
        memory = []
        for device in self.devices:
            memory.append(
                RankMemory(
                    poison(torch.empty(num_local_tokens, hidden, dtype=torch.bfloat16, device=device)),
                    poison(torch.empty(num_local_tokens, topk, device=device)),
                    poison(torch.empty(num_local_tokens * topk, hidden, dtype=torch.bfloat16, device=device)),
                    torch.zeros(ep_size, ROW_WORDS, dtype=torch.int64, device=device),
                    torch.zeros(2, num_local_tokens, topk, dtype=torch.int32, device=device),
                    torch.zeros(2, dtype=torch.int64, device=device),
                    poison(torch.empty(num_local_tokens, hidden, dtype=torch.bfloat16, device=device)),
                    poison(torch.empty(num_local_tokens * topk, device=device)),
                )
            )
        self.memory = memory
        self.executors = []
        for rank, device in enumerate(self.devices):
            with torch.cuda.device(device):
                self.executors.append(
                    CudaExecutor(
                        ExecutorShape(
                            rank, ep_size, num_local_tokens, topk, hidden, inner, local, self.minibatch, self.macrobatch, self.capacity
                        ),
                        memory,
                        poison(torch.empty(self.macrobatch, hidden, dtype=torch.bfloat16, device=device)),
                        poison(torch.empty(self.macrobatch, inner, dtype=torch.bfloat16, device=device)),
                        poison(torch.empty(self.macrobatch, device=device)),
                        library(),
                    )
                )
        self.synchronize_devices()

    def each(self, function) -> list:
        """Call function(rank, executor) of every rank on its device and stream."""
        results = []
        for rank, executor in enumerate(self.executors):
            with torch.cuda.device(self.devices[rank]), torch.cuda.stream(self.streams[rank]):
                results.append(function(rank, executor))
        return results

    def synchronize_devices(self) -> None:
        for device in set(self.devices):
            torch.cuda.synchronize(device)

    def synchronize(self) -> None:
        for stream in self.streams:
            stream.synchronize()

    def faults(self) -> list[list[int]]:
        return [executor.fault.tolist() for executor in self.executors]

    def schedules(self, routes: list[torch.Tensor]) -> list[MoKSchedule]:
        placed = [r.to(d) for r, d in zip(routes, self.devices, strict=True)]
        self.each(lambda rank, _: self.streams[rank].wait_stream(torch.cuda.default_stream(self.devices[rank])))
        made = self.each(lambda rank, executor: executor.build_schedule(placed[rank], TIMEOUT_SECONDS))
        self.synchronize()
        return made

    def forward(self, problem: Problem, *, save: bool = False, num_comm_sms: int = 0, split: bool = False):
        """Outputs and contexts of every rank, on the CPU and on the devices."""
        schedules = self.schedules(problem.topk_experts)
        local = self.local
        placed = []
        for rank, device in enumerate(self.devices):
            w13, w2 = (w[rank * local : (rank + 1) * local].to(device) for w in (problem.w13, problem.w2))
            if split:
                w13, w2 = [w.clone() for w in w13], [w.clone() for w in w2]
            context = None
            if save:
                context = MoKContext(
                    poison(torch.empty(self.macrobatch, problem.w13.shape[2], dtype=torch.bfloat16, device=device)),
                    poison(torch.empty(self.macrobatch, problem.w13.shape[1], dtype=torch.bfloat16, device=device)),
                )
            placed.append((problem.x[rank].to(device), problem.router_weights[rank].to(device), w13, w2, context))
        self.synchronize_devices()
        outputs = self.each(
            lambda rank, executor: executor.forward(
                schedules[rank],
                *placed[rank][:4],
                context=placed[rank][4],
                timeout_seconds=TIMEOUT_SECONDS,
                num_comm_sms=num_comm_sms,
                sm_reserve=self.sm_reserve,
            )
        )
        self.synchronize()
        faults = self.faults()
        if any(fault[0] for fault in faults):
            raise RuntimeError(f"faults: {faults}")
        return [y.cpu() for y in outputs], [p[4] for p in placed], schedules
