"""NCCL all-to-all around grouped GEMMs, the way a layer without a communication library of its own does it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mok_megatron.bench.problem import LayerProblem
from mok_megatron.bench.rows.base import Row
from mok_megatron.bench.rows.experts import fused, grouped_experts, sum_rows


class NcclRow(Row):
    """Sort routes by expert, gather rows, all-to-all, order by local expert, experts, and all the way back.

    The one wait is the one that the method needs: all_to_all_single takes row counts on the host. Sorting and gathering run while the
    counts travel. At EP 1 nothing is exchanged and nothing waits.
    """

    name = "nccl"
    label = "NCCL all-to-all + grouped_mm"
    wire = "route"

    def __init__(self, problem: LayerProblem) -> None:
        super().__init__(problem)
        ranks, device = problem.ranks, problem.ranks.device
        self.waits_for_gpu = ranks.ep_size > 1
        self._expert_edges = torch.arange(problem.num_experts + 1, dtype=torch.int16, device=device)
        on_gpu = device.type == "cuda"
        self._host_splits = torch.empty(2, ranks.ep_size, dtype=torch.int64, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None

    @classmethod
    def unavailable(cls, problem: LayerProblem) -> str | None:
        return None if problem.num_experts < 2**15 else "more than 32767 experts"

    def forward(self) -> torch.Tensor:
        p, ep_size = self.problem, self.problem.ranks.ep_size
        tokens, topk = p.topk_experts.shape
        # 16 bits: half the passes of the radix sort.
        keys, order = torch.sort(p.topk_experts.view(-1).to(torch.int16), stable=True)
        sent = torch.searchsorted(keys, self._expert_edges).diff()  # routes to each expert
        received = self._exchange_counts(sent) if ep_size > 1 else sent
        rows = p.x[order // topk]
        weights = p.router_weights.view(-1)[order]
        if ep_size > 1:
            rows = self._experts_of_all(rows, weights, received)
        else:
            rows = grouped_experts(rows, weights, sent.cumsum(0).to(torch.int32), p.w13, p.w2)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        return fused(sum_rows, rows.device.type)(rows, places.view(tokens, topk))

    def _exchange_counts(self, sent: torch.Tensor) -> torch.Tensor:
        """Rows that arrive [EP * E_local], source first; their sums and the sums of ``sent`` a rank start on their way to the host."""
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.problem.ranks.group)
        ep_size = self.problem.ranks.ep_size
        splits = torch.stack([sent.view(ep_size, -1).sum(1), received.view(ep_size, -1).sum(1)])
        self._host_splits.copy_(splits, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return received

    def _experts_of_all(self, rows: torch.Tensor, weights: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        p, group = self.problem, self.problem.ranks.group
        if self._copied is not None:
            self._copied.synchronize()
        out_splits, in_splits = self._host_splits.tolist()
        total = sum(in_splits)
        arrived_weights = weights.new_empty(total)
        dist.all_to_all_single(arrived_weights, weights, in_splits, out_splits, group=group)
        arrived = rows.new_empty(total, rows.shape[1])
        dist.all_to_all_single(arrived, rows, in_splits, out_splits, group=group)
        order, ends = self._by_local_expert(received, total)
        results = grouped_experts(arrived[order], arrived_weights[order], ends, p.w13, p.w2)
        back = torch.empty_like(arrived).index_copy_(0, order, results)
        returned = torch.empty_like(rows)
        dist.all_to_all_single(returned, back, out_splits, in_splits, group=group)
        return returned

    def _by_local_expert(self, received: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the rows of (local expert, source) lie in the arrived order (source, local expert): int64 [total]; and ends int32 [E_local]."""
        counts = received.view(self.problem.ranks.ep_size, -1)
        lengths = counts.t().reshape(-1)
        arrived_starts = (received.cumsum(0) - received).view_as(counts).t().reshape(-1)
        shifts = arrived_starts - (lengths.cumsum(0) - lengths)
        order = torch.arange(total, device=received.device) + torch.repeat_interleave(shifts, lengths, output_size=total)
        return order, counts.sum(0).cumsum(0).to(torch.int32)
