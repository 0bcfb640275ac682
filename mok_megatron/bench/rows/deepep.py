"""DeepEP's intranode dispatch and combine around the same grouped GEMMs."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch

from mok_megatron.bench.problem import LayerProblem
from mok_megatron.bench.rows.base import AutogradRow, missing
from mok_megatron.bench.rows.experts import GatherSums, SpreadRows, Take, grouped_experts


@dataclasses.dataclass
class _Exchange:
    """One dispatch and what it leaves for the way back: local expert ids [N, K], -1 elsewhere; rows of each local expert; the handle."""

    buffer: Any
    arguments: dict[str, Any]
    ids: torch.Tensor | None = None
    counts: list[int] = dataclasses.field(default_factory=list)
    handle: Any = None


class _Dispatch(torch.autograd.Function):
    """x [T, H], p [T, K] -> arrived tokens [N, H] and their router weights [N, K]; the gradients come back by a combine."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, p: torch.Tensor, exchange: _Exchange) -> tuple[torch.Tensor, torch.Tensor]:
        arrived, exchange.ids, weights, exchange.counts, exchange.handle, _ = exchange.buffer.dispatch(x, topk_weights=p, **exchange.arguments)
        ctx.exchange = exchange
        return arrived, weights

    @staticmethod
    def backward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        dx, d_p, _ = ctx.exchange.buffer.combine(rows.contiguous(), ctx.exchange.handle, topk_weights=weights.float())
        return dx, d_p, None


class _Combine(torch.autograd.Function):
    """Sums of arrived tokens [N, H] -> y [T, H]; the gradient is a dispatch by the same handle."""

    @staticmethod
    def forward(ctx: Any, sums: torch.Tensor, exchange: _Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.buffer.combine(sums, exchange.handle)[0]

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.exchange.buffer.dispatch(dy.contiguous(), handle=ctx.exchange.handle)[0], None


class DeepEPRow(AutogradRow):
    """``deep_ep.Buffer`` with its default configurations; rows are copied for each local expert after they arrive."""

    name = "deepep"
    label = "DeepEP + grouped_mm"
    wire = "token"

    def __init__(self, problem: LayerProblem) -> None:
        super().__init__(problem)
        deep_ep = importlib.import_module("deep_ep")
        ep_size, group = problem.ranks.ep_size, problem.ranks.group
        row_bytes = problem.shape.hidden_size * problem.x.element_size()
        configs = [deep_ep.Buffer.get_dispatch_config(ep_size), deep_ep.Buffer.get_combine_config(ep_size)]
        self._buffer: Any = deep_ep.Buffer(group, max(c.get_nvl_buffer_size_hint(row_bytes, ep_size) for c in configs), 0)
        self._ids = problem.topk_experts.to(getattr(deep_ep, "topk_idx_t", torch.int64))

    @classmethod
    def unavailable(cls, problem: LayerProblem) -> str | None:
        if missing("deep_ep"):
            return missing("deep_ep")
        if not hasattr(importlib.import_module("deep_ep"), "Buffer"):
            return "not installed (this deep_ep has no Buffer)"
        return None if problem.ranks.device.type == "cuda" and problem.ranks.ep_size > 1 else "needs GPUs and EP > 1"

    def waits_for_gpu(self, phase: str) -> bool:
        return True

    def layer(self, x: torch.Tensor, p: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, *, keep: bool) -> torch.Tensor:
        per_rank, _, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(self._ids, self.problem.num_experts)
        counted = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
        exchange = _Exchange(self._buffer, {"topk_idx": self._ids, **counted})
        arrived, weights = _Dispatch.apply(x, p, exchange)
        # ids are local, -1 where the route goes elsewhere; the counts are on the host already.
        ids, total, topk = exchange.ids, sum(exchange.counts), exchange.ids.shape[1]
        keys = torch.where(ids < 0, self.problem.shape.experts_per_gpu, ids).view(-1).to(torch.int16)
        order = torch.sort(keys, stable=True).indices[:total]
        ends = torch.tensor(exchange.counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(x.device, non_blocking=True)
        places = torch.full((ids.numel(),), -1, dtype=torch.int64, device=x.device)
        places = places.scatter_(0, order, torch.arange(total, device=x.device)).view(-1, topk)
        token = order // topk
        results = grouped_experts(SpreadRows.apply(arrived, token, places), Take.apply(weights.view(-1), order), ends, w13, w2)
        return _Combine.apply(GatherSums.apply(results, token, places), exchange)
