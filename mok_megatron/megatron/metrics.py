"""Expert load: how many routes each expert served, kept as integers on the device and looked at only when asked.

The counts are those of the route schedule, which every rank has for its own experts over all ranks of its group: no communication
and no synchronisation before :func:`collect`. Padding has no routes; a forward pass that is run again is not counted again; passes
of evaluation are not counted.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class LoadSummary:
    """Load of one layer's experts."""

    layer: int
    counts: tuple[int, ...]
    """Routes of each expert, by global id."""

    @property
    def routes(self) -> int:
        return sum(self.counts)

    @property
    def max_over_mean(self) -> float:
        """1.0 is perfect balance; 0.0 where nothing was routed."""
        return max(self.counts) * len(self.counts) / self.routes if self.routes else 0.0

    @property
    def dead_experts(self) -> int:
        return sum(count == 0 for count in self.counts)

    @property
    def standard_deviation(self) -> float:
        """Of the population."""
        mean = self.routes / len(self.counts)
        return (sum((count - mean) ** 2 for count in self.counts) / len(self.counts)) ** 0.5


@dataclass(frozen=True)
class LoadReport:
    """Load of all layers of this pipeline stage, in the order of the layers."""

    layers: tuple[LoadSummary, ...]

    def percentile(self, percent: float) -> float:
        """Percentile over the layers of max/mean, linear between neighbours."""
        values = torch.tensor([layer.max_over_mean for layer in self.layers], dtype=torch.float64)
        return float(torch.quantile(values, percent / 100))

    def lines(self) -> list[str]:
        """For the run log: one line a layer and one over the layers."""
        text = [
            f"layer {s.layer}: max/mean {s.max_over_mean:.3f}, dead experts {s.dead_experts}, std {s.standard_deviation:.3f}, routes {s.routes}"
            for s in self.layers
        ]
        if self.layers:
            p50, p90, top = (self.percentile(p) for p in (50, 90, 100))
            text.append(f"over {len(self.layers)} layers: max/mean p50 {p50:.3f}, p90 {p90:.3f}, max {top:.3f}")
        return text


class LoadCounter:
    """Counts of one layer."""

    def __init__(self, ep_group: Any, expert_dp_group: Any) -> None:
        self._groups = (ep_group, expert_dp_group)
        self._local: Tensor | None = None
        self.layer = 0
        self.number = next(_numbers)
        _counters.add(self)

    def add(self, layer: int, expert_rows: Tensor) -> None:
        """Adds the routes of one forward pass, [E_local] integers."""
        self.layer = layer
        counts = expert_rows.to(torch.int64)
        self._local = counts.clone() if self._local is None else self._local.add_(counts)

    def collect(self, reset: bool) -> LoadSummary | None:
        """Counts over the expert-parallel group (concatenated) and the expert-data-parallel group (added)."""
        if self._local is None:
            return None
        ep_group, expert_dp_group = self._groups
        counts = self._local.clone()
        if reset:
            self._local.zero_()
        if _size(expert_dp_group) > 1:
            dist.all_reduce(counts, group=expert_dp_group)
        if _size(ep_group) > 1:
            parts = [torch.empty_like(counts) for _ in range(_size(ep_group))]
            dist.all_gather(parts, counts, group=ep_group)
            counts = torch.cat(parts)
        return LoadSummary(self.layer, tuple(counts.tolist()))


_numbers = itertools.count()
# Weak: a model that is gone takes its counters with it.
_counters: weakref.WeakSet[LoadCounter] = weakref.WeakSet()


def _size(group: Any) -> int:
    return 1 if group is None else group.size()


def collect(*, reset: bool = True) -> LoadReport:
    """The load since the last reset. Collective: every rank of the layers' groups calls it.

    Args:
        reset: start counting anew.
    """
    # One order on all ranks, that of building where layers share a number (MTP); a set has none.
    counters = sorted(_counters, key=lambda counter: (counter.layer, counter.number))
    summaries = [counter.collect(reset) for counter in counters]
    return LoadReport(tuple(s for s in summaries if s is not None))
