"""NCCL all-to-all around grouped GEMMs, the way a layer without a communication library of its own does it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mok_megatron.bench.phases import BACKWARD
from mok_megatron.bench.problem import LayerProblem
from mok_megatron.bench.rows.base import AutogradRow
from mok_megatron.bench.rows.experts import GatherSums, Place, SpreadRows, Take, grouped_experts


class _AllToAll(torch.autograd.Function):
    """all_to_all_single of rows; the gradient travels back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, arriving: list[int], leaving: list[int], group: Any) -> torch.Tensor:
        ctx.splits = leaving, arriving, group
        out = rows.new_empty(sum(arriving), *rows.shape[1:])
        dist.all_to_all_single(out, rows, arriving, leaving, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, rows: torch.Tensor) -> tuple[Any, ...]:
        arriving, leaving, group = ctx.splits
        out = rows.new_empty(sum(arriving), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), arriving, leaving, group=group)
        return out, None, None, None


class NcclRow(AutogradRow):
    """Sort routes by expert, gather rows, all-to-all, order by local expert, experts, and all the way back.

    The one wait is the one that the method needs: all_to_all_single takes row counts on the host. Sorting and gathering run while the
    counts travel. At EP 1 nothing is exchanged and nothing waits, and a backward knows its counts.
    """

    name = "nccl"
    label = "NCCL all-to-all + grouped_mm"
    wire = "route"

    def __init__(self, problem: LayerProblem) -> None:
        super().__init__(problem)
        ranks, device = problem.ranks, problem.ranks.device
        self._expert_edges = torch.arange(problem.num_experts + 1, dtype=torch.int16, device=device)
        on_gpu = device.type == "cuda"
        self._host_splits = torch.empty(2, ranks.ep_size, dtype=torch.int64, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None

    @classmethod
    def unavailable(cls, problem: LayerProblem) -> str | None:
        return None if problem.num_experts < 2**15 else "more than 32767 experts"

    def waits_for_gpu(self, phase: str) -> bool:
        return self.problem.ranks.ep_size > 1 and phase != BACKWARD

    def layer(self, x: torch.Tensor, p: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, *, keep: bool) -> torch.Tensor:
        ids, ep_size = self.problem.topk_experts, self.problem.ranks.ep_size
        tokens, topk = ids.shape
        # 16 bits: half the passes of the radix sort.
        keys, order = torch.sort(ids.view(-1).to(torch.int16), stable=True)
        sent = torch.searchsorted(keys, self._expert_edges).diff()  # routes to each expert
        received = self._exchange_counts(sent) if ep_size > 1 else sent
        token = order // topk
        places = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device)).view(tokens, topk)
        rows, weights = SpreadRows.apply(x, token, places), Take.apply(p.view(-1), order)
        if ep_size > 1:
            rows = self._experts_of_all(rows, weights, received, w13, w2)
        else:
            rows = grouped_experts(rows, weights, sent.cumsum(0).to(torch.int32), w13, w2)
        return GatherSums.apply(rows, token, places)

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

    def _experts_of_all(
        self, rows: torch.Tensor, weights: torch.Tensor, received: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
    ) -> torch.Tensor:
        group = self.problem.ranks.group
        if self._copied is not None:
            self._copied.synchronize()
        out_splits, in_splits = self._host_splits.tolist()
        arrived_weights = _AllToAll.apply(weights, in_splits, out_splits, group)
        arrived = _AllToAll.apply(rows, in_splits, out_splits, group)
        order, ends = self._by_local_expert(received, sum(in_splits))
        results = grouped_experts(Take.apply(arrived, order), Take.apply(arrived_weights, order), ends, w13, w2)
        return _AllToAll.apply(Place.apply(results, order), out_splits, in_splits, group)

    def _by_local_expert(self, received: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the rows of (local expert, source) lie in the arrived order (source, local expert): int64 [total]; and ends int32 [E_local]."""
        counts = received.view(self.problem.ranks.ep_size, -1)
        lengths = counts.t().reshape(-1)
        arrived_starts = (received.cumsum(0) - received).view_as(counts).t().reshape(-1)
        shifts = arrived_starts - (lengths.cumsum(0) - lengths)
        order = torch.arange(total, device=received.device) + torch.repeat_interleave(shifts, lengths, output_size=total)
        return order, counts.sum(0).cumsum(0).to(torch.int32)
