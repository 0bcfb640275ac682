"""One layer to measure: the routes, inputs and weights that every row of the benchmark shares."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from mok_megatron.bench import workloads
from mok_megatron.bench.shapes import ModelShape

BLOCK_ROWS = 128


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Where this process stands.

    group: ranks on the device's backend (NCCL, or gloo on the CPU); None at EP 1. host_group: the same ranks on gloo.
    """

    rank: int
    ep_size: int
    device: torch.device
    group: Any = None
    host_group: Any = None

    def gather(self, value: Any) -> list[Any]:
        """One picklable value of every rank."""
        if self.host_group is None:
            return [value]
        values: list[Any] = [None] * self.ep_size
        dist.all_gather_object(values, value, group=self.host_group)
        return values

    def barrier(self) -> None:
        if self.host_group is not None:
            dist.barrier(group=self.host_group)

    def alone(self) -> Ranks:
        """This rank as a group of one."""
        return Ranks(0, 1, self.device)


class MainGrad:
    """fp32 gradients of the weights as a training framework keeps them, made when first asked for: twice the size of the weights."""

    def __init__(self, w13: torch.Tensor, w2: torch.Tensor) -> None:
        self._weights = (w13, w2)
        self._tensors: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def num_bytes(self) -> int:
        return sum(weight.numel() * torch.float32.itemsize for weight in self._weights)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[E_local, 2I, H] and [E_local, H, I]. They start as normal numbers: a call that overwrites them must not look right."""
        if self._tensors is None:
            w13, w2 = (torch.empty(w.shape, dtype=torch.float32, device=w.device).normal_() for w in self._weights)
            self._tensors = w13, w2
        return self._tensors


@dataclasses.dataclass(frozen=True)
class LayerProblem:
    """What one rank brings.

    shape: the model. routes: int32 [T_r, K] of every rank r, on the CPU. x: [T, H]. topk_experts: int32 [T, K]. router_weights: fp32 [T, K],
    they sum to 1. w13: [E_local, 2I, H], gate rows first. w2: [E_local, H, I]. dy: [T, H], the gradient of the output. main_grad: what the
    rows that accumulate share.
    """

    shape: ModelShape
    ranks: Ranks
    routes: tuple[torch.Tensor, ...]
    x: torch.Tensor
    topk_experts: torch.Tensor
    router_weights: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    dy: torch.Tensor
    main_grad: MainGrad

    @property
    def num_experts(self) -> int:
        return self.shape.experts_per_gpu * self.ranks.ep_size

    @property
    def max_tokens(self) -> int:
        """The most tokens any rank brings."""
        return max(len(routes) for routes in self.routes)

    def expert_rows(self) -> torch.Tensor:
        """Routes of every expert from every rank: int64 [EP (source), E]."""
        return torch.stack([torch.bincount(r[r >= 0].long(), minlength=self.num_experts) for r in self.routes])

    def local_expert_rows(self) -> list[int]:
        """Routes of each of this rank's experts."""
        return self.expert_rows().sum(0).view(self.ranks.ep_size, -1)[self.ranks.rank].tolist()

    def padded_rank_rows(self) -> list[int]:
        """Rows of MoK on every rank: the routes of each expert, padded to 128."""
        blocks = (self.expert_rows().sum(0) + BLOCK_ROWS - 1) // BLOCK_ROWS
        return (blocks.view(self.ranks.ep_size, -1).sum(1) * BLOCK_ROWS).tolist()

    def alone(self) -> LayerProblem:
        """The same rows for each local expert, with the same weights, and no other rank."""
        routes = workloads.dealt_routes(self.local_expert_rows(), self.shape.topk)
        return _with_inputs(self.shape, self.ranks.alone(), (routes,), self.w13, self.w2, self.main_grad, seed=self.ranks.rank)


def make_problem(shape: ModelShape, ranks: Ranks, workload: str, *, tokens: int, seed: int) -> LayerProblem:
    """The problem of this rank: EP * ``tokens`` tokens in all, normal inputs, weights scaled by fan-in, bf16.

    Raises:
        MoKArgumentError: unknown workload, or a shape that it cannot have.
    """
    total, experts = tokens * ranks.ep_size, shape.experts_per_gpu * ranks.ep_size
    table = workloads.expert_ids(workload, seed=seed, num_tokens=total, num_experts=experts, topk=shape.topk)
    cuts = workloads.rank_tokens(workload, seed=seed, num_tokens=total, ep_size=ranks.ep_size)
    generator = torch.Generator(ranks.device).manual_seed(seed + 1000 * ranks.rank + 1)
    hidden, inner = shape.hidden_size, shape.intermediate_size
    w13 = _normal((shape.experts_per_gpu, 2 * inner, hidden), hidden**-0.5, generator)
    w2 = _normal((shape.experts_per_gpu, hidden, inner), inner**-0.5, generator)
    return _with_inputs(shape, ranks, tuple(table.split(cuts)), w13, w2, MainGrad(w13, w2), seed=seed + ranks.rank)


def _normal(sizes: tuple[int, ...], scale: float, generator: torch.Generator) -> torch.Tensor:
    """bf16, made one matrix at a time: the fp32 twin of all the weights of a GPU would not fit beside them everywhere."""
    out = torch.empty(sizes, dtype=torch.bfloat16, device=generator.device)
    for matrix in out if out.dim() == 3 else (out,):
        matrix.copy_(torch.randn(matrix.shape, generator=generator, device=generator.device) * scale)
    return out


def _with_inputs(
    shape: ModelShape,
    ranks: Ranks,
    routes: tuple[torch.Tensor, ...],
    w13: torch.Tensor,
    w2: torch.Tensor,
    main_grad: MainGrad,
    *,
    seed: int,
) -> LayerProblem:
    generator = torch.Generator(ranks.device).manual_seed(seed)
    own = routes[ranks.rank].to(ranks.device)
    x = _normal((len(own), shape.hidden_size), 1.0, generator)
    logits = torch.randn(len(own), shape.topk, generator=generator, device=ranks.device)
    router_weights = torch.softmax(logits, dim=1).where(own >= 0, 0.0)
    dy = _normal((len(own), shape.hidden_size), 1.0, generator)
    return LayerProblem(shape, ranks, routes, x, own, router_weights, w13, w2, dy, main_grad)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Counts of the routes, the same on every rank.

    routes: of the whole group. rank_rows: rows that each rank computes. padding_share: share of MoK's rows that are padding.
    remote_bytes_by_route, remote_bytes_by_token: bytes that the busiest rank receives from other ranks, there and back, when a token crosses
    once for each route, or once for each rank that wants it.
    """

    routes: int
    rank_rows: list[int]
    padding_share: float
    remote_bytes_by_route: int
    remote_bytes_by_token: int

    @property
    def busiest_rank_share(self) -> float:
        """Rows of the busiest rank over the mean."""
        return max(self.rank_rows) * len(self.rank_rows) / max(self.routes, 1)


def count_traffic(problem: LayerProblem) -> Traffic:
    ep_size, experts = problem.ranks.ep_size, problem.shape.experts_per_gpu
    sent = problem.expert_rows()  # [source, expert]
    by_expert = sent.sum(0)
    padded, routes = sum(problem.padded_rank_rows()), int(by_expert.sum())
    by_token = torch.zeros(ep_size, ep_size, dtype=torch.int64)
    for source, table in enumerate(problem.routes):
        owner = torch.where(table < 0, -1, table // experts)
        by_token[source] = torch.stack([(owner == rank).any(dim=1).sum() for rank in range(ep_size)])
    row_bytes = problem.shape.hidden_size * problem.x.element_size()
    return Traffic(
        routes=routes,
        rank_rows=by_expert.view(ep_size, -1).sum(1).tolist(),
        padding_share=1.0 - routes / padded if padded else 0.0,
        remote_bytes_by_route=_busiest_bytes(sent.view(ep_size, ep_size, -1).sum(2), row_bytes),
        remote_bytes_by_token=_busiest_bytes(by_token, row_bytes),
    )


def _busiest_bytes(rows: torch.Tensor, row_bytes: int) -> int:
    """rows[s, d] rows go from s to d in dispatch, and their results from d to s in combine."""
    remote = rows.clone().fill_diagonal_(0)
    return int((remote.sum(0) + remote.sum(1)).max()) * row_bytes
