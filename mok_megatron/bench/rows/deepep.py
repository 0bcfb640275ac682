"""DeepEP's intranode dispatch and combine around the same grouped GEMMs."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from mok_megatron.bench.problem import LayerProblem
from mok_megatron.bench.rows.base import Row, missing
from mok_megatron.bench.rows.experts import fused, grouped_experts, sum_rows


class DeepEPRow(Row):
    """``deep_ep.Buffer`` with its default configurations; rows are copied for each local expert after they arrive."""

    name = "deepep"
    label = "DeepEP + grouped_mm"
    wire = "token"
    waits_for_gpu = True

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

    def forward(self) -> torch.Tensor:
        p = self.problem
        per_rank, _, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(self._ids, p.num_experts)
        arrived, ids, weights, counts, handle, _ = self._buffer.dispatch(
            p.x,
            topk_idx=self._ids,
            topk_weights=p.router_weights,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        # ids are local, -1 where the route goes elsewhere; the counts are on the host already.
        total, topk = sum(counts), ids.shape[1]
        keys = torch.where(ids < 0, p.shape.experts_per_gpu, ids).view(-1).to(torch.int16)
        order = torch.sort(keys, stable=True).indices[:total]
        ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(p.x.device, non_blocking=True)
        results = grouped_experts(arrived[order // topk], weights.view(-1)[order], ends, p.w13, p.w2)
        places = torch.full((ids.numel(),), -1, dtype=torch.int64, device=p.x.device)
        places.scatter_(0, order, torch.arange(total, device=p.x.device))
        summed = fused(sum_rows, results.device.type)(results, places.view(-1, topk))
        return self._buffer.combine(summed, handle)[0]
