"""HybridEP's dispatch and combine around the same grouped GEMMs."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from mok_megatron.bench.problem import LayerProblem
from mok_megatron.bench.rows.base import Row, missing
from mok_megatron.bench.rows.experts import grouped_experts

_SMALLEST_BUFFER = 512  # tokens a rank


class HybridEPRow(Row):
    """dispatch_with_permute and combine_with_unpermute with their defaults, as Megatron-Core calls them (``flex``, ``hybridep``).

    The routing map and the dense probabilities [T, E] that the library takes are made beforehand: Megatron's router yields them as they are.
    """

    name = "hybridep"
    label = "HybridEP + grouped_mm"
    wire = "token"
    waits_for_gpu = True

    def __init__(self, problem: LayerProblem) -> None:
        super().__init__(problem)
        tokens, experts = problem.x.shape[0], problem.num_experts
        ids = problem.topk_experts.long()
        self._map = torch.zeros(tokens, experts, dtype=torch.bool, device=ids.device).scatter_(1, ids, True)
        self._probs = torch.zeros(tokens, experts, device=ids.device).scatter_(1, ids, problem.router_weights)
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

    def forward(self) -> torch.Tensor:
        p = self.problem
        rows, weights, _, counts, handle = self._buffer.dispatch_with_permute(
            hidden=p.x, routing_map=self._map, probs=self._probs, scaling_factor=None, num_of_experts_per_rank=p.shape.experts_per_gpu
        )
        ends = counts.to(rows.device, non_blocking=True).cumsum(0).to(torch.int32)
        results = grouped_experts(rows, weights.view(-1), ends, p.w13, p.w2)
        return self._buffer.combine_with_unpermute(hidden=results, handle=handle)[0]
