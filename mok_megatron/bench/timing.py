"""Clocks for one call at a time on all ranks at once, and what is said about a list of readings."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mok_megatron.bench.problem import Ranks

_FILLER_SIZE = 8192
_FILLERS = 6
_CALLS_IN_A_ROW = 10
_COPY_BYTES = 2**31  # far beyond the L2 cache
_COPY_BYTES_ON_CPU = 2**24
_COPIES = 9


@dataclasses.dataclass(frozen=True)
class Reading:
    """milliseconds on the device from the common start to the end of the call; host_us that the call kept the host."""

    milliseconds: float
    host_us: float


def _host_us_in_a_row(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    for _ in range(_CALLS_IN_A_ROW):
        result = call()  # the last one's goes when this one is there: ten sets of weight gradients would not fit
    host_us = (time.perf_counter() - started) * 1e6 / _CALLS_IN_A_ROW
    del result
    return host_us


class CpuClock:
    """Wall time behind a barrier."""

    hides_us = math.inf  # there are no launches

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def time(self, call: Callable[[], Any]) -> Reading:
        self._ranks.barrier()
        started = time.perf_counter()
        call()
        seconds = time.perf_counter() - started
        return Reading(seconds * 1e3, seconds * 1e6)

    def time_host(self, call: Callable[[], Any]) -> float:
        """Host microseconds a call, of several in a row."""
        self._ranks.barrier()
        return _host_us_in_a_row(call)


class CudaClock:
    """CUDA events around a call whose launches are hidden.

    Before the call: the device is idle, all ranks meet, then matrix products of a few milliseconds are queued, and behind them an
    all-reduce of one number, so that the GPUs start the call together. The host issues the call meanwhile. The products also evict the L2
    cache. A method that waits for the GPU inside its call waits for the products as well and pays for its later launches: a cost of the method.
    hides_us: how long the products run, that is how much host time of a call they hide.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._operands = [torch.randn(_FILLER_SIZE, _FILLER_SIZE, device=ranks.device, dtype=torch.bfloat16) for _ in range(2)]
        self._product = torch.empty_like(self._operands[0])
        self._token = torch.zeros(1, device=ranks.device)
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(3):  # the first one loads the library
            torch.cuda.synchronize(ranks.device)
            self._start.record()
            self._fill()
            self._end.record()
            self._end.synchronize()
        self.hides_us = self._start.elapsed_time(self._end) * 1e3

    def _fill(self) -> None:
        for _ in range(_FILLERS):
            torch.mm(*self._operands, out=self._product)

    def time(self, call: Callable[[], Any]) -> Reading:
        torch.cuda.synchronize(self._ranks.device)
        self._ranks.barrier()
        self._fill()
        if self._ranks.group is not None:
            dist.all_reduce(self._token, group=self._ranks.group)
        self._start.record()
        started = time.perf_counter()
        result = call()
        host_us = (time.perf_counter() - started) * 1e6
        self._end.record()
        self._end.synchronize()
        del result  # not before the end of the call: freeing may cost host time
        return Reading(self._start.elapsed_time(self._end), host_us)

    def time_host(self, call: Callable[[], Any]) -> float:
        """Host microseconds a call, of several in a row behind a busy device: what a training step pays, whose host runs ahead.

        The first call after a wait, which `time` reads, costs more: the host's caches and clock are cold.
        """
        torch.cuda.synchronize(self._ranks.device)
        self._ranks.barrier()
        for _ in range(_CALLS_IN_A_ROW):
            self._fill()
        host_us = _host_us_in_a_row(call)
        torch.cuda.synchronize(self._ranks.device)
        return host_us


Clock = CpuClock | CudaClock


def make_clock(ranks: Ranks) -> Clock:
    return CudaClock(ranks) if ranks.device.type == "cuda" else CpuClock(ranks)


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median and the 10th and 90th percentile."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Percentiles by linear interpolation; at least one value."""
        points = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
        p10, median, p90 = torch.quantile(torch.tensor(values, dtype=torch.float64), points).tolist()
        return cls(median, p10, p90)

    def contains(self, value: float) -> bool:
        return self.p10 <= value <= self.p90

    def to_dict(self) -> dict[str, float]:
        return dataclasses.asdict(self)


Name = TypeVar("Name", bound=Hashable)


def interleaved(clock: Clock, calls: dict[Name, Callable[[], Any]], *, iterations: int, warmup: int) -> dict[Name, list[Reading]]:
    """Time the calls in turn, ``iterations`` times each after ``warmup`` untimed rounds.

    Every other round goes backwards, ABCCBA…: a call finds the GPU as hot as the one before left it, and must not always have the same one.
    """
    readings: dict[Name, list[Reading]] = {name: [] for name in calls}
    for iteration in range(-warmup, iterations):
        for name, call in list(calls.items())[:: 1 if iteration % 2 == 0 else -1]:
            reading = clock.time(call)
            if iteration >= 0:
                readings[name].append(reading)
    return readings


def host_times(clock: Clock, calls: dict[Name, Callable[[], Any]], *, iterations: int) -> dict[Name, list[float]]:
    """Host microseconds a call, of calls in a row, ``iterations`` readings each."""
    return {name: [clock.time_host(call) for _ in range(iterations)] for name, call in calls.items()}


def copy_rate(ranks: Ranks, clock: Clock) -> float:
    """Bytes a second, read and written, of a large copy inside the device's memory: the median of some, of the slowest rank."""
    source = torch.empty(_COPY_BYTES if ranks.device.type == "cuda" else _COPY_BYTES_ON_CPU, dtype=torch.uint8, device=ranks.device)
    target = torch.empty_like(source)
    source.random_()
    readings = interleaved(clock, {"copy": lambda: target.copy_(source)}, iterations=_COPIES, warmup=2)["copy"]
    seconds = Spread.of([reading.milliseconds for reading in readings]).median * 1e-3
    return min(ranks.gather(2 * source.numel() / seconds))


def slowest_rank(ranks: Ranks, readings: dict[Name, list[Reading]]) -> dict[Name, list[Reading]]:
    """Each reading's maximum over the ranks: a layer is done when its last rank is."""
    everyone = ranks.gather(readings)
    return {
        name: [
            Reading(max(r.milliseconds for r in same), max(r.host_us for r in same))
            for same in zip(*(rank[name] for rank in everyone), strict=True)
        ]
        for name in readings
    }
