"""HybridEP's dispatch and combine around the same grouped GEMMs."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch

from mok_megatron.bench.gradients import Gradients
from mok_megatron.bench.problem import LayerProblem
from mok_megatron.bench.rows.base import AutogradRow, missing
from mok_megatron.bench.rows.experts import grouped_experts

_SMALLEST_BUFFER = 512  # tokens a rank


@dataclasses.dataclass
class _Exchange:
    """One dispatch and what it leaves for the way back."""

    buffer: Any
    routing_map: torch.Tensor
    experts_per_gpu: int
    counts: torch.Tensor | None = None
    handle: Any = None


class _Dispatch(torch.autograd.Function):
    """x [T, H], probs fp32 [T, E] -> rows of the local experts [R, H] and their probabilities [R]; the gradients come back by a combine."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, probs: torch.Tensor, exchange: _Exchange) -> tuple[torch.Tensor, torch.Tensor]:
        rows, weights, _, exchange.counts, exchange.handle = exchange.buffer.dispatch_with_permute(
            hidden=x,
            routing_map=exchange.routing_map,
            probs=probs,
            scaling_factor=None,
            num_of_experts_per_rank=exchange.experts_per_gpu,
        )
        ctx.exchange = exchange
        return rows, weights

    @staticmethod
    def backward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        exchange = ctx.exchange
        dx, d_probs = exchange.buffer.combine_with_unpermute(hidden=rows.contiguous(), probs=weights.contiguous(), handle=exchange.handle)
        return dx, d_probs, None


class _Combine(torch.autograd.Function):
    """Results [R, H] -> y [T, H]; the gradient is a dispatch by the same handle."""

    @staticmethod
    def forward(ctx: Any, results: torch.Tensor, exchange: _Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.buffer.combine_with_unpermute(hidden=results, handle=exchange.handle)[0]

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        exchange = ctx.exchange
        return exchange.buffer.dispatch_with_permute(hidden=dy.contiguous(), scaling_factor=None, handle=exchange.handle)[0], None


class HybridEPRow(AutogradRow):
    """dispatch_with_permute and combine_with_unpermute with their defaults, as Megatron-Core calls them (``flex``, ``hybridep``).

    The routing map and the dense probabilities [T, E] that the library takes are made beforehand: Megatron's router yields them as they are,
    and takes their gradient.
    """

    name = "hybridep"
    label = "HybridEP + grouped_mm"
    wire = "token"

    def __init__(self, problem: LayerProblem) -> None:
        super().__init__(problem)
        ids = problem.topk_experts.long()
        self._map = torch.zeros(len(ids), problem.num_experts, dtype=torch.bool, device=ids.device).scatter_(1, ids, True)
        self._buffer: Any = importlib.import_module("deep_ep").HybridEPBuffer(
            group=problem.ranks.group,
            hidden_dim=problem.shape.hidden_size,
            max_num_of_tokens_per_rank=max(problem.max_tokens, _SMALLEST_BUFFER),
            num_local_experts=problem.shape.experts_per_gpu,
            use_fp8=False,
        )

    @classmethod
    def unavailable(cls, problem: LayerProblem) -> str | None:
        if missing("deep_ep"):
            return missing("deep_ep")
        if not hasattr(importlib.import_module("deep_ep"), "HybridEPBuffer"):
            return "not installed (this deep_ep has no HybridEPBuffer)"
        if problem.ranks.device.type != "cuda" or problem.ranks.ep_size == 1:
            return "needs GPUs and EP > 1"
        if len({len(routes) for routes in problem.routes}) > 1:
            return "needs the same number of tokens on every rank"
        return None if problem.num_experts % 4 == 0 else "needs a number of experts that 4 divides"

    def waits_for_gpu(self, phase: str) -> bool:
        return True

    def leaves(self) -> tuple[torch.Tensor, ...]:
        p = self.problem
        probs = torch.zeros(len(p.x), p.num_experts, device=p.x.device).scatter_(1, p.topk_experts.long(), p.router_weights)
        return p.x, probs, p.w13, p.w2

    def layer(self, x: torch.Tensor, p: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, *, keep: bool) -> torch.Tensor:
        exchange = _Exchange(self._buffer, self._map, self.problem.shape.experts_per_gpu)
        rows, weights = _Dispatch.apply(x, p, exchange)
        ends = exchange.counts.to(rows.device, non_blocking=True).cumsum(0).to(torch.int32)
        return _Combine.apply(grouped_experts(rows, weights.view(-1), ends, w13, w2), exchange)

    def gradients(self, returned: tuple[torch.Tensor, ...]) -> Gradients:
        dx, d_probs, dw13, dw2 = returned
        return Gradients(dx, d_probs.gather(1, self.problem.topk_experts.long()), dw13, dw2)
