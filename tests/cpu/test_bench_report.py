"""Timing, numbers, table, JSON and chart of the benchmark, on readings that are known."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mok_megatron.bench import report, timing
from mok_megatron.bench.chart import write_chart
from mok_megatron.bench.layer import RowResult, measure
from mok_megatron.bench.oracle import Verdict
from mok_megatron.bench.phases import BACKWARD, FORWARD, FORWARD_BACKWARD, PHASES
from mok_megatron.bench.problem import LayerProblem, MainGrad, Ranks, count_traffic, make_problem
from mok_megatron.bench.rows import COMPETITORS, MoKAloneRow, MoKRepeatedRow, MoKScheduleRow, Row
from mok_megatron.bench.rows.replay import replay_sizes
from mok_megatron.bench.shapes import ModelShape
from mok_megatron.bench.timing import Reading, Spread, slowest_rank
from mok_megatron.config import MoKConfig
from tests.cpu.bench_helpers import CPU, SHAPE, CountingClock, small_problem


def _result(row: type[Row], milliseconds: list[float], host_us: float = 50.0, waits: bool = False, phase: str = FORWARD) -> RowResult:
    readings, host = [Reading(ms, host_us) for ms in milliseconds], [] if waits else [host_us / 10]
    return RowResult(row, phase, verdict=Verdict(1e-3, 1e-2), waits_for_gpu=waits, readings=readings, host_us=host)


def _problem_of(routes: list[list[list[int]]], **knobs: Any) -> LayerProblem:
    """Routes [rank][token][slot] of two experts a rank; only their counts matter."""
    tables = tuple(torch.tensor(r, dtype=torch.int32) for r in routes)
    shape = ModelShape("counts", hidden_size=64, intermediate_size=64, topk=2, experts_per_gpu=2, config=MoKConfig(**knobs))
    x = torch.zeros(len(routes[0]), 64, dtype=torch.bfloat16)
    return LayerProblem(shape, Ranks(0, len(routes), CPU), tables, x, tables[0], torch.zeros(len(routes[0]), 2), x, x, x, MainGrad(x, x))


def test_traffic_by_hand() -> None:
    # Experts 0, 1 on rank 0 and 2, 3 on rank 1. Rank 0 sends 3 rows to rank 1, of 2 tokens; rank 1 sends 1 row to rank 0.
    traffic = count_traffic(_problem_of([[[0, 1], [2, 3], [0, 2]], [[2, 3], [1, 3]]]))
    assert traffic.routes == 10
    assert traffic.rank_rows == [4, 6]
    assert traffic.busiest_rank_share == pytest.approx(6 / 5)
    assert traffic.padding_share == pytest.approx(1 - 10 / 512)
    # Rank 0 receives 1 row in dispatch and 3 results; rank 1 the other way round. A row is 128 bytes.
    assert traffic.remote_bytes_by_route == 4 * 128
    assert traffic.remote_bytes_by_token == 3 * 128


def _replay_problem(minibatch_size: int) -> LayerProblem:
    """Experts 0 to 3 have 300, 0, 300 and 200 rows: rank 0 has 3 blocks, rank 1 has 3 and 2 of them."""
    return _problem_of([[[0, 2]] * 150 + [[-1, 3]] * 200, [[0, 2]] * 150], minibatch_size=minibatch_size)


@pytest.mark.parametrize(("minibatch", "recomputed", "replayed"), [(128, 384, 256), (256, 512, 128), (512, 512, 128)])
def test_replay_sizes_by_hand(minibatch: int, recomputed: int, replayed: int) -> None:
    problem = _replay_problem(minibatch)
    assert problem.padded_rank_rows() == [384, 640]
    sizes = replay_sizes(problem)
    assert (sizes.rows, sizes.minibatch_size, sizes.recomputed_rows, sizes.replayed_rows) == (640, minibatch, recomputed, replayed)
    assert COMPETITORS["mok_replay"].unavailable(problem) is None
    assert "640 rows are one minibatch of 640" in COMPETITORS["mok_replay"].unavailable(_replay_problem(640))


def _replay_record(without: str | None = None) -> dict[str, Any]:
    times = {"mok": [2.0, 2.0, 2.5], "mok_replay": [2.6, 2.5, 3.1], "mok_repeated": [0.6, 0.75, 0.6]}
    rows = {"mok_repeated": MoKRepeatedRow, **COMPETITORS}
    results = {(name, BACKWARD): _result(rows[name], ms, phase=BACKWARD) for name, ms in times.items() if name != without}
    described = {"workload": "uniform", "tokens": 350, "seed": 7}
    return report.make_record(_replay_problem(128), results, **described, hides_us=1000.0, copy_rate=4e12)


def test_replay_by_hand() -> None:
    record = _replay_record()
    # Two thirds as many rows are replayed as are recomputed: 0.4, 0.5 and 0.4 ms, beside 0.6, 0.5 and 0.6 more.
    assert record["replay"] == {
        "more_ms": pytest.approx({"median": 0.6, "p10": 0.52, "p90": 0.6}),
        "repeated_ms": pytest.approx({"median": 0.4, "p10": 0.4, "p90": 0.48}),
        "overhead": pytest.approx({"median": 0.5, "p10": 0.1, "p90": 0.5}),
        "replayed_rows": 256,
        "recomputed_rows": 384,
    }
    rows = {row["name"]: row for row in record["rows"]}
    assert rows["mok_replay"]["tflops"] and rows["mok_repeated"]["tflops"] is None and rows["mok_repeated"]["remote_bytes"] is None
    json.dumps(record)
    (line,) = [line for line in report.table(record).splitlines() if line.startswith("replay: ")]
    assert "takes 600 us (520 to 600) more with one macrobatch of 256 rows replayed" in line
    assert "repeats 400 us (400 to 480), a launch and a start" in line and line.endswith("overhead 50.0% (10.0% to 50.0%)")


@pytest.mark.parametrize("without", ["mok", "mok_replay", "mok_repeated"])
def test_replay_needs_all_three_rows(without: str) -> None:
    record = _replay_record(without)
    assert record["replay"] is None and "replay: " not in report.table(record)


def test_spread_is_median_and_percentiles() -> None:
    spread = Spread.of([float(v) for v in range(11)])
    assert (spread.median, spread.p10, spread.p90) == (5.0, 1.0, 9.0)
    assert spread.contains(1.0) and not spread.contains(0.9)


def test_slowest_rank_counts_reading_by_reading() -> None:
    class Two(Ranks):
        def gather(self, value: Any) -> list[Any]:
            return [value, {"a": [Reading(3.0, 1.0), Reading(1.0, 9.0)]}]

    got = slowest_rank(Two(0, 2, CPU), {"a": [Reading(2.0, 5.0), Reading(4.0, 5.0)]})
    assert got == {"a": [Reading(3.0, 5.0), Reading(4.0, 9.0)]}


def test_rows_are_timed_in_turn_phase_by_phase_and_every_other_round_goes_backwards() -> None:
    clock = CountingClock()
    results = measure(small_problem(Ranks(0, 1, CPU)), [COMPETITORS["bare"], COMPETITORS["mok"]], clock, iterations=2, warmup=1)
    forward = [("bare", FORWARD), ("mok", FORWARD), ("mok_schedule", FORWARD)]
    others = [(name, phase) for phase in (FORWARD_BACKWARD, BACKWARD) for name in ("bare", "mok")]
    there = [*forward, *others]
    back = there[::-1]
    assert clock.called == [*back, *there, *back]  # the untimed round, then the two that count
    assert [reading.milliseconds for reading in results["bare", FORWARD].readings] == [8.0, 21.0]
    assert [reading.milliseconds for reading in results["mok", BACKWARD].readings] == [14.0, 15.0]
    assert len(results["mok", BACKWARD].host_us) == len(results["mok", FORWARD].host_us) == 3


def test_phases_are_chosen() -> None:
    clock = CountingClock()
    rows = [COMPETITORS[name] for name in ("mok", "mok_context", "mok_bf16grad")]
    shape = dataclasses.replace(SHAPE, config=MoKConfig(minibatch_size=128))
    problem = make_problem(shape, Ranks(0, 1, CPU), "uniform", tokens=40, seed=7)
    results = measure(problem, rows, clock, iterations=1, warmup=0, phases=[BACKWARD])
    assert clock.called == [("mok", BACKWARD), ("mok_bf16grad", BACKWARD)]
    assert results["mok_context", BACKWARD].reason == "has no other phase than forward"
    # 120 routes and a quarter are 256 rows in blocks, and a block an expert; but no more than there can be, 128 and a block an expert.
    memory, rows = results["mok", BACKWARD].memory, min(256, 128) + 4 * 128
    assert memory["macrobatch_rows"] == rows
    assert memory["context_bytes"] == memory["promised_context_bytes"] == rows * (128 + 2 * 192) * 2
    assert sum(memory["workspace_bytes"].values()) > memory["context_bytes"]


def test_forwards_alone_need_no_gradients() -> None:
    problem = small_problem(Ranks(0, 1, CPU))
    results = measure(problem, [COMPETITORS["mok"], COMPETITORS["bare"]], CountingClock(), iterations=1, warmup=0, phases=[FORWARD])
    assert {phase for _, phase in results} == {FORWARD} and all(result.status == "ok" for result in results.values())
    assert problem.main_grad._tensors is None


def test_copy_rate_counts_what_is_read_and_written_on_the_slowest_rank() -> None:
    class Clock(CountingClock):
        def time(self, call: Any) -> Reading:
            call()
            return Reading(2.0, 1.0)

    class Two(Ranks):
        def gather(self, value: Any) -> list[Any]:
            return [value, 5e9]

    assert timing.copy_rate(Ranks(0, 1, CPU), Clock()) == pytest.approx(2 * 2**24 / 2e-3)
    assert timing.copy_rate(Two(0, 2, CPU), Clock()) == 5e9


@pytest.fixture
def record() -> dict[str, Any]:
    mok, nccl, bare, sonic = (COMPETITORS[name] for name in ("mok", "nccl", "bare", "sonicmoe"))
    results = {
        ("mok", FORWARD): _result(mok, [1.2, 1.0, 1.1]),
        ("mok", BACKWARD): _result(mok, [2.2, 2.2, 2.2], phase=BACKWARD),
        ("mok", FORWARD_BACKWARD): _result(mok, [3.6, 3.6, 3.6], phase=FORWARD_BACKWARD),
        ("nccl", FORWARD): _result(nccl, [3.0, 3.0, 3.3], waits=True),
        ("bare", FORWARD): _result(bare, [1.0, 1.0, 1.0], host_us=2000.0),
        ("bare", BACKWARD): _result(bare, [2.0, 2.0, 2.0], phase=BACKWARD),
        ("bare", FORWARD_BACKWARD): _result(bare, [3.0, 3.0, 3.0], phase=FORWARD_BACKWARD),
        ("sonicmoe", FORWARD): RowResult(sonic, FORWARD, "skipped", "not installed (sonicmoe)"),
        ("mok_schedule", FORWARD): _result(MoKScheduleRow, [0.011, 0.011, 0.011]),
        ("mok_ep1", FORWARD): _result(MoKAloneRow, [1.1, 0.99, 1.0]),
        ("mok_ep1", FORWARD_BACKWARD): _result(MoKAloneRow, [3.4, 3.4, 3.5], phase=FORWARD_BACKWARD),
    }
    results["mok", FORWARD].memory = {
        "context_bytes": 2_000_000,
        "macrobatch_rows": 640,
        "promised_context_bytes": 2_000_000,
        "workspace_bytes": {"symmetric": 3_000_000, "ring.x": 1_000_000},
    }
    described = {"workload": "uniform", "tokens": 40, "seed": 7}
    return report.make_record(small_problem(Ranks(0, 1, CPU)), results, **described, hides_us=1000.0, copy_rate=4e12)


def test_numbers_of_a_record(record: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in record["rows"] if row["phase"] == FORWARD}
    assert rows["mok"]["milliseconds"]["median"] == 1.1
    assert rows["mok"]["ratio_to_bare"] == pytest.approx({"median": 1.1, "p10": 1.02, "p90": 1.18})
    assert rows["mok"]["ratio_is_tie"] is False
    assert rows["mok"]["tflops"] == pytest.approx(6 * 40 * 3 * 128 * 192 / 1.1e-3 * 1e-12)
    assert rows["mok_ep1"]["ratio_is_tie"] is True
    assert rows["mok"]["host_us"]["median"] == 5.0 and rows["mok"]["host_us_first_call"]["median"] == 50.0
    assert rows["mok"]["launches_hidden"] is True
    assert rows["bare"]["launches_hidden"] is False
    assert rows["nccl"]["host_us"] is None and rows["nccl"]["launches_hidden"] is None
    assert rows["sonicmoe"]["milliseconds"] is None and rows["sonicmoe"]["reason"] == "not installed (sonicmoe)"
    assert rows["mok_schedule"]["tflops"] is None and rows["mok_schedule"]["ratio_to_bare"] is None
    assert record["schedule_share"] == pytest.approx(0.01)
    assert record["exposed_communication_us"][FORWARD] == pytest.approx({"median": 100.0, "p10": 28.0, "p90": 100.0})
    assert record["padding_share"] == pytest.approx(1 - 120 / 512)
    json.dumps(record)


def test_each_phase_has_its_own_floor_and_flops(record: dict[str, Any]) -> None:
    assert [row["phase"] for row in record["rows"]] == sorted((row["phase"] for row in record["rows"]), key=PHASES.index)
    rows = {row["phase"]: row for row in record["rows"] if row["name"] == "mok"}
    assert rows[BACKWARD]["ratio_to_bare"]["median"] == pytest.approx(1.1)
    assert rows[FORWARD_BACKWARD]["ratio_to_bare"]["median"] == pytest.approx(1.2)
    unit = 40 * 3 * 128 * 192 * 1e-12
    assert rows[BACKWARD]["tflops"] == pytest.approx(12 * unit / 2.2e-3) and rows[FORWARD_BACKWARD]["tflops"] == pytest.approx(
        18 * unit / 3.6e-3
    )
    assert record["exposed_communication_us"][FORWARD_BACKWARD]["median"] == pytest.approx(200.0)
    assert BACKWARD not in record["exposed_communication_us"]
    moved = 2 * 4 * 4 * 3 * 128 * 192
    assert record["main_grad"] == {"bytes": moved, "milliseconds": pytest.approx(moved / 4e12 * 1e3)}


def test_table_says_everything_once(record: dict[str, Any]) -> None:
    lines = report.table(record).splitlines()
    by_row = {tuple(cell.strip() for cell in line.split("  ") if cell.strip())[:2]: line for line in lines}
    assert "1.100 (1.020 to 1.180)" in by_row[FORWARD, "MoK"] and "tie" not in by_row[FORWARD, "MoK"]
    assert "3.600 (3.600 to 3.600)" in by_row[FORWARD_BACKWARD, "MoK"] and "2.200 (2.200 to 2.200)" in by_row[BACKWARD, "MoK"]
    assert by_row[FORWARD, "MoK at EP 1, same rows"].count("tie") == 1
    assert "skipped: not installed (sonicmoe)" in by_row[FORWARD, "SonicMoE"]
    assert "waits for GPU" in by_row[FORWARD, "NCCL all-to-all + grouped_mm"]
    assert "200 (2000, not hidden)" in by_row[FORWARD, "bare grouped GEMMs"]
    assert "schedule 1.0% of MoK's forward" in lines
    assert "exposed communication, forward: 100 us (28 to 100)" in lines
    assert "exposed communication, forward+backward: 200 us (120 to 200)" in lines
    assert any("main_grad" in line and "0.001 ms at the 4 TB/s" in line for line in lines)
    assert any("MoK keeps 2 MB a layer" in line and "640 rows" in line and "is 4 MB" in line for line in lines)


def test_wrong_rows_are_failures_and_skipped_ones_are_not(record: dict[str, Any]) -> None:
    assert report.failures([record]) == []
    record["rows"][1] |= {"status": "wrong", "reason": "rank 0: row 3"}
    assert report.failures([record]) == ["small, uniform, NCCL all-to-all + grouped_mm, forward: wrong: rank 0: row 3"]


def test_skew_is_told_beside_the_busiest_rank(record: dict[str, Any]) -> None:
    skewed = json.loads(json.dumps(record)) | {"workload": "zipf_1.0", "busiest_rank_share": 1.5}
    for row in skewed["rows"]:
        if row["name"] == "mok":
            row["milliseconds"]["median"] = {FORWARD: 1.98, BACKWARD: 2.64, FORWARD_BACKWARD: 3.6}[row["phase"]]
    assert report.skews([record]) == []
    forward, both, backward = report.skews([record, skewed])
    assert "forward: MoK takes 1.800 of uniform on zipf_1.0" in forward and "1.200 for the rows" in forward
    assert "forward+backward: MoK takes 1.000 of uniform" in both and "backward: MoK takes 1.200" in backward and "0.800 for" in backward


def test_chart(record: dict[str, Any], tmp_path: Path) -> None:
    assert write_chart(tmp_path / "a.png", [record, record]) is None
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    for row in record["rows"]:
        row["tflops"] = None
    assert write_chart(tmp_path / "b.png", [record]) == "b.png was not written: no row was timed"
    assert not (tmp_path / "b.png").exists()


def test_chart_of_equal_readings(record: dict[str, Any], tmp_path: Path) -> None:
    """Where p90 is the median, the bar's error must not be below 0 by a rounding."""
    pairs = ((0.1 * rate, 0.1 * time) for rate in range(1, 100) for time in range(1, 100))
    rate, time = next((rate, time) for rate, time in pairs if rate * time / time > rate)
    for row in record["rows"]:
        if row["milliseconds"]:
            row["tflops"], row["milliseconds"] = rate, {"median": time, "p10": time, "p90": time}
    assert write_chart(tmp_path / "a.png", [record]) is None


def test_chart_without_matplotlib(record: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert write_chart(tmp_path / "a.png", [record]) == "a.png was not written: matplotlib is not installed"


def test_cuda_clock_starts_behind_idle_ranks_and_a_filler(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("record")

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, end: Any) -> float:
            return 2.5

    class Two(Ranks):
        def barrier(self) -> None:
            log.append("barrier")

    monkeypatch.setattr(timing, "_FILLER_SIZE", 4)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("idle"))
    monkeypatch.setattr(torch, "mm", lambda a, b, out: log.append("mm"))
    monkeypatch.setattr(timing.dist, "all_reduce", lambda token, group: log.append(f"all_reduce {group}"))
    clock = timing.CudaClock(Two(0, 2, CPU, "group", None))
    assert clock.hides_us == 2500.0
    log.clear()
    reading = clock.time(lambda: log.append("call"))
    assert log == ["idle", "barrier", *["mm"] * 6, "all_reduce group", "record", "call", "record", "wait"]
    assert reading.milliseconds == 2.5 and 0.0 < reading.host_us < 1e6
    log.clear()
    assert 0.0 < clock.time_host(lambda: log.append("call")) < 1e6
    # Ten calls in a row, queued behind products that keep the device busy for all of them.
    assert log == ["idle", "barrier", *["mm"] * 60, *["call"] * 10, "idle"]
