"""The compiled route schedule against a slow reference in plain Python, its limits, and its speed."""

from __future__ import annotations

import statistics
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mok_megatron import ops
from tests.cpu.problems import random_routes

BM = 128


def reference(routes: list[np.ndarray], rank: int, local_experts: int, capacity: int) -> dict[str, np.ndarray]:
    """Rows in the order (expert, source rank, token, slot), every expert padded to 128, by exhaustive search."""
    source_rank, source_slot = np.full(capacity, -1), np.full(capacity, -1)
    counts, offsets = [], [0]
    for expert in range(rank * local_experts, (rank + 1) * local_experts):
        found = [
            (source, token * table.shape[1] + slot)
            for source, table in enumerate(routes)
            for token in range(table.shape[0])
            for slot in range(table.shape[1])
            if table[token, slot] == expert
        ]
        counts.append(len(found))
        for i, (source, place) in enumerate(found):
            if offsets[-1] + i < capacity:
                source_rank[offsets[-1] + i], source_slot[offsets[-1] + i] = source, place
        offsets.append(offsets[-1] + (len(found) + BM - 1) // BM * BM)
    return {
        "row_source_rank": source_rank,
        "row_source_slot": source_slot,
        "expert_rows": np.array(counts),
        "expert_row_offsets": np.array(offsets),
        "num_rows": np.array([offsets[-1]]),
    }


def build(routes: list[np.ndarray], rank: int, local_experts: int, capacity: int) -> dict[str, torch.Tensor]:
    """The operator's tables; unused rows of the gathered ids hold expert 0, which must not be counted."""
    most = max(max(t.shape[0] for t in routes), 1)
    gathered = torch.zeros(len(routes), most, routes[0].shape[1], dtype=torch.int32)
    for source, table in enumerate(routes):
        gathered[source, : table.shape[0]] = torch.from_numpy(table)
    tokens = torch.tensor([t.shape[0] for t in routes], dtype=torch.int64)
    names = ("row_source_rank", "row_source_slot", "expert_rows", "expert_row_offsets", "num_rows")
    return dict(zip(names, ops.route_schedule(gathered, tokens, rank, local_experts, capacity), strict=True))


def assert_equal_tables(got: dict[str, torch.Tensor], want: dict[str, np.ndarray]) -> None:
    for name, expected in want.items():
        np.testing.assert_array_equal(got[name].numpy(), expected, err_msg=name)


def tables(seed: int, tokens: list[int], experts: int, topk: int, missing: float) -> list[np.ndarray]:
    generator = torch.Generator().manual_seed(seed)
    return [random_routes(t, experts, topk, generator, missing).numpy() for t in tokens]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.lists(st.integers(0, 300), min_size=1, max_size=8),
    local_experts=st.integers(1, 5),
    topk=st.integers(1, 4),
    missing=st.sampled_from([0.0, 0.2, 1.0]),
)
def test_schedule_equals_the_slow_reference(seed: int, tokens: list[int], local_experts: int, topk: int, missing: float) -> None:
    experts = local_experts * len(tokens)
    topk = min(topk, experts)
    routes = tables(seed, tokens, experts, topk, missing)
    capacity = -(-sum(tokens) * topk // BM) * BM + local_experts * BM
    rank = seed % len(tokens)
    want = reference(routes, rank, local_experts, capacity)
    assert_equal_tables(build(routes, rank, local_experts, capacity), want)


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 255, 256, 257])
def test_experts_are_padded_to_128_rows(rows: int) -> None:
    routes = [np.zeros((rows, 1), dtype=np.int32), np.full((3, 1), 1, dtype=np.int32)]
    got = build(routes, 0, 2, 1024)
    padded = (rows + 127) // 128 * 128
    assert got["expert_rows"].tolist() == [rows, 3]
    assert got["expert_row_offsets"].tolist() == [0, padded, padded + 128]
    assert got["row_source_slot"][:rows].tolist() == list(range(rows))
    assert set(got["row_source_slot"][rows:padded].tolist()) <= {-1}


def test_rows_of_an_expert_come_by_source_rank_then_token() -> None:
    routes = [np.array([[0, 1], [1, 2]], dtype=np.int32), np.array([[-1, 1]], dtype=np.int32)]
    got = build(routes, 0, 3, 512)
    rows = list(zip(got["row_source_rank"].tolist(), got["row_source_slot"].tolist(), strict=True))
    assert rows[0] == (0, 0)
    assert rows[128:131] == [(0, 1), (0, 2), (1, 1)]
    assert rows[256] == (0, 3)


def test_overflow_reports_needed_rows_and_never_writes_beyond_the_table() -> None:
    routes = [np.full((200, 1), 1, dtype=np.int32)]
    got = build(routes, 0, 4, 128)
    assert int(got["num_rows"]) == 256 and got["expert_rows"].tolist() == [0, 200, 0, 0]
    assert got["row_source_rank"].shape == (128,)


def test_a_t6_row_offsets_are_64_bit() -> None:
    """Row 299,594 of width 7168 is the first whose offset does not fit 32 bits."""
    assert ops.row_offset(299_593, 7168) == 2_147_482_624 < 2**31
    assert ops.row_offset(299_594, 7168) == 2_147_489_792 > 2**31


@pytest.mark.parametrize("experts", [127, 128, 129])
@pytest.mark.parametrize("topk", [1, 2, 8])
def test_a_t6_boundary_counts(seed: int, experts: int, topk: int) -> None:
    for tokens in (255, 256, 257, 512, 513):
        routes = tables(seed, [tokens], experts, topk, 0.0)
        capacity = (tokens * topk // BM + 1 + experts) * BM
        got = build(routes, 0, experts, capacity)
        assert_equal_tables(got, {"expert_rows": np.bincount(routes[0].reshape(-1), minlength=experts)})
        real = got["row_source_slot"][got["row_source_slot"] >= 0]
        assert sorted(real.tolist()) == list(range(tokens * topk))


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ([[0, 1], [-1, -1], [2, -1]], (ops.RouteFaultKind.NONE, -1, -1, -1)),
        ([[0, 1], [3, 3]], (ops.RouteFaultKind.DUPLICATE, 1, 1, 3)),
        ([[0, 4], [3, 3]], (ops.RouteFaultKind.OUT_OF_RANGE, 0, 1, 4)),
        ([[0, -2]], (ops.RouteFaultKind.OUT_OF_RANGE, 0, 1, -2)),
        ([[2**31 - 1, 0]], (ops.RouteFaultKind.OUT_OF_RANGE, 0, 0, 2**31 - 1)),
    ],
)
def test_a_t4_first_bad_id_is_found(rows: list[list[int]], fault: tuple[object, int, int, int]) -> None:
    assert ops.find_route_fault(torch.tensor(rows, dtype=torch.int32), 4) == fault


def test_operator_refuses_tables_that_it_cannot_trust() -> None:
    gathered, tokens = torch.zeros(2, 4, 2, dtype=torch.int32), torch.tensor([4, 4])
    for arguments in [
        (gathered.long(), tokens, 0, 2, 128),
        (gathered, torch.tensor([4, 5]), 0, 2, 128),
        (gathered, torch.tensor([4]), 0, 2, 128),
        (gathered, tokens, 2, 2, 128),
        (gathered, tokens, 0, 2, 100),
        (gathered.transpose(0, 1), tokens, 0, 2, 128),
    ]:
        with pytest.raises(RuntimeError):
            ops.route_schedule(*arguments)


def test_schedule_of_32768_rows_and_64_experts_takes_under_5_ms(seed: int) -> None:
    routes = tables(seed, [2048] * 2, 64, 8, 0.0)
    gathered, tokens = torch.from_numpy(np.stack(routes)), torch.tensor([2048, 2048])
    seconds = []
    for _ in range(15):
        start = time.perf_counter()
        ops.route_schedule(gathered, tokens, 0, 64, 32_768 + 64 * BM)
        seconds.append(time.perf_counter() - start)
    assert statistics.median(seconds) < 5e-3, seconds


def test_task_lookup_does_not_scan_the_experts() -> None:
    """The same rows spread over 4 and over 256 experts: the time of one task must not grow with their number."""

    def seconds_per_task(experts: int) -> float:
        offsets = torch.arange(experts + 1, dtype=torch.int64) * (32_768 // experts)
        blocks = 32_768 // BM
        shape = ops.PassShape(ops.Pass.FORWARD, 0, 1, 4096, 512, 512, experts, 8, blocks, blocks)
        times = []
        for _ in range(9):
            start = time.perf_counter()
            table, _ = ops.task_table(offsets, shape, ops.Stream.COMPUTE)
            times.append((time.perf_counter() - start) / table.shape[0])
        return statistics.median(times)

    few, many = seconds_per_task(4), seconds_per_task(256)
    assert many < 3 * few + 2e-7, (few, many)
