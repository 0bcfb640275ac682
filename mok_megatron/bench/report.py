"""From row results to numbers, a table and JSON.

A record is one (shape, workload, tokens) on all ranks, as it stands in the JSON file:

    model, hidden_size, intermediate_size, topk, experts_per_gpu, ep, workload, tokens_per_gpu, seed, config (knobs of MoK)
    routes                 of the whole group
    busiest_rank_share     rows of the busiest rank over the mean
    padding_share          share of MoK's rows that pad an expert to 128
    rows[]                 name, label, phase, status ("ok", "wrong", "failed", "skipped"), reason, is_layer,
                           error, tolerance          largest error of the sampled tokens, see oracle.py
                           milliseconds              median, p10, p90 of the slowest rank
                           ratio_to_bare             the same of the quotients round by round; ratio_is_tie: 1 lies between p10 and p90
                           tflops                    6 H I a route, padding not counted, the mean rank's routes over the median
                           remote_bytes              received from other ranks by the busiest one, there and back
                           host_us                   median, p10, p90 that one of several calls in a row keeps the host; null where it waits
                           host_us_first_call        the same of a call after a wait, as the timed ones are
                           launches_hidden           the host was faster than the filler that hides it; null where it waits
                           samples_ms                every round
    schedule_share         median of the schedule over that of MoK's forward
    exposed_communication_us  median, p10, p90 of MoK minus MoK at EP 1 with the same rows, round by round
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mok_megatron import build_info
from mok_megatron.bench.layer import PHASE, RowResult
from mok_megatron.bench.problem import LayerProblem, Traffic, count_traffic
from mok_megatron.bench.timing import Spread


def make_record(
    problem: LayerProblem, results: dict[str, RowResult], *, workload: str, tokens: int, seed: int, hides_us: float
) -> dict[str, Any]:
    """One record out of the results by row name."""
    traffic, shape = count_traffic(problem), problem.shape
    times = {name: [reading.milliseconds for reading in result.readings] for name, result in results.items() if result.readings}
    record: dict[str, Any] = {
        "model": shape.model,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "topk": shape.topk,
        "experts_per_gpu": shape.experts_per_gpu,
        "ep": problem.ranks.ep_size,
        "workload": workload,
        "tokens_per_gpu": tokens,
        "seed": seed,
        "config": shape.config.to_dict(),
        "routes": traffic.routes,
        "busiest_rank_share": traffic.busiest_rank_share,
        "padding_share": traffic.padding_share,
        "rows": [_row(problem, result, traffic, times.get("bare"), hides_us) for result in results.values()],
        "schedule_share": None,
        "exposed_communication_us": None,
    }
    if "mok" in times and "mok_schedule" in times:
        record["schedule_share"] = Spread.of(times["mok_schedule"]).median / Spread.of(times["mok"]).median
    if "mok" in times and "mok_ep1" in times:
        differences = [(group - alone) * 1e3 for group, alone in zip(times["mok"], times["mok_ep1"], strict=True)]
        record["exposed_communication_us"] = Spread.of(differences).to_dict()
    return record


def _row(problem: LayerProblem, result: RowResult, traffic: Traffic, bare: list[float] | None, hides_us: float) -> dict[str, Any]:
    row = result.row
    wire = {"route": traffic.remote_bytes_by_route, "token": traffic.remote_bytes_by_token, "none": 0}
    entry: dict[str, Any] = {
        "name": row.name,
        "label": row.label,
        "phase": PHASE,
        "status": result.status,
        "reason": result.reason,
        "is_layer": row.is_layer,
        "error": None if result.verdict is None else result.verdict.error,
        "tolerance": None if result.verdict is None else result.verdict.tolerance,
        "milliseconds": None,
        "ratio_to_bare": None,
        "ratio_is_tie": None,
        "tflops": None,
        "remote_bytes": wire[row.wire] if row.is_layer else None,
        "host_us": None,
        "host_us_first_call": None,
        "launches_hidden": None,
        "samples_ms": [reading.milliseconds for reading in result.readings],
    }
    if not result.readings:
        return entry
    spread = Spread.of(entry["samples_ms"])
    entry["milliseconds"] = spread.to_dict()
    if not result.waits_for_gpu:
        entry["host_us"] = Spread.of(result.host_us).to_dict()
        first = Spread.of([reading.host_us for reading in result.readings])
        entry["host_us_first_call"] = first.to_dict()
        entry["launches_hidden"] = first.p90 < hides_us
    if row.is_layer:
        entry["tflops"] = problem.shape.forward_flops(traffic.routes / problem.ranks.ep_size) / (spread.median * 1e-3) * 1e-12
        if bare is not None:
            ratio = Spread.of([own / floor for own, floor in zip(entry["samples_ms"], bare, strict=True)])
            entry["ratio_to_bare"] = ratio.to_dict()
            entry["ratio_is_tie"] = ratio.contains(1.0) and row.name != "bare"
    return entry


_COLUMNS = ("row", "ms (p10 to p90)", "over bare (p10 to p90)", "TFLOP/s", "remote MB", "host us (first call)", "error / tolerance")


def table(record: dict[str, Any]) -> str:
    """A record as text."""
    head = (
        f"{record['model']}: H {record['hidden_size']}, I {record['intermediate_size']}, K {record['topk']}, "
        f"{record['experts_per_gpu']} experts a GPU, EP {record['ep']}, {record['tokens_per_gpu']} tokens a GPU, {record['workload']}"
    )
    counts = f"busiest rank {record['busiest_rank_share']:.2f} of the mean, padding {record['padding_share']:.1%}"
    cells = [_COLUMNS, *(_cells(row) for row in record["rows"])]
    widths = [max(len(line[i]) for line in cells if len(line) == len(_COLUMNS)) for i in range(len(_COLUMNS))]
    widths[0] = max(widths[0], *(len(line[0]) for line in cells))
    lines = []
    for line in cells:  # a row that was not timed has its reason instead of the numbers
        numbers = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)] if len(line) == len(_COLUMNS) else line[1:]
        lines.append("  ".join([line[0].ljust(widths[0]), *numbers]))
    tail = []
    if record["schedule_share"] is not None:
        tail.append(f"schedule {record['schedule_share']:.1%} of MoK's forward")
    if record["exposed_communication_us"] is not None:
        tail.append("exposed communication {median:.0f} us ({p10:.0f} to {p90:.0f})".format(**record["exposed_communication_us"]))
    return "\n".join([head, counts, *(line.rstrip() for line in lines), *(["; ".join(tail)] if tail else [])])


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if row["status"] != "ok":
        return (row["label"], f"{row['status']}: {row['reason']}")
    time, ratio, host = row["milliseconds"], row["ratio_to_bare"], row["host_us"]
    over_bare = "" if ratio is None else "{median:.3f} ({p10:.3f} to {p90:.3f})".format(**ratio) + (" tie" if row["ratio_is_tie"] else "")
    remote = row["remote_bytes"]
    hidden = "" if row["launches_hidden"] else ", not hidden"
    host_text = "waits for GPU" if host is None else f"{host['median']:.0f} ({row['host_us_first_call']['median']:.0f}{hidden})"
    return (
        row["label"],
        "{median:.3f} ({p10:.3f} to {p90:.3f})".format(**time),
        over_bare,
        "" if row["tflops"] is None else f"{row['tflops']:.4g}",
        "" if remote is None else f"{remote / 1e6:.4g}",
        host_text,
        "exact" if row["tolerance"] == 0 else f"{row['error']:.1e} / {row['tolerance']:.1e}",
    )


def skews(records: Sequence[dict[str, Any]]) -> list[str]:
    """What a skewed workload costs MoK beside the uniform one, beyond what the busiest rank's share of the rows explains: a line each."""
    lines = []
    for record in records:
        same = [r for r in records if all(r[key] == record[key] for key in ("model", "tokens_per_gpu"))]
        uniform = next((r for r in same if r["workload"] == "uniform"), None)
        if uniform is None or record is uniform or _mok_median(record) is None or _mok_median(uniform) is None:
            continue
        ratio = _mok_median(record) / _mok_median(uniform)
        share = record["busiest_rank_share"] / uniform["busiest_rank_share"]
        lines.append(
            f"{record['model']}, {record['tokens_per_gpu']} tokens a GPU: MoK takes {ratio:.3f} of uniform on {record['workload']}, "
            f"{ratio / share:.3f} for the rows of the busiest rank"
        )
    return lines


def _mok_median(record: dict[str, Any]) -> float | None:
    return next((row["milliseconds"]["median"] for row in record["rows"] if row["name"] == "mok" and row["milliseconds"]), None)


def failures(records: Sequence[dict[str, Any]]) -> list[str]:
    """Rows that are wrong or failed, one line each."""
    return [
        f"{record['model']}, {record['workload']}, {row['label']}: {row['status']}: {row['reason']}"
        for record in records
        for row in record["rows"]
        if row["status"] in ("wrong", "failed")
    ]


def environment(device: torch.device) -> dict[str, Any]:
    """What the numbers were taken on."""
    found: dict[str, Any] = {"package": build_info(), "torch": torch.__version__, "device": str(device.type)}
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["num_sms"] = torch.cuda.get_device_properties(device).multi_processor_count
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["clocks"] = _clocks()
    else:
        found["num_threads"] = torch.get_num_threads()
    return found


def _clocks() -> list[str] | None:
    """SM clock, power and temperature of every GPU as the driver's tool tells them; None without the tool."""
    query = ["nvidia-smi", "--query-gpu=index,clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None


def write_json(path: Path, records: Sequence[dict[str, Any]], about: dict[str, Any]) -> None:
    """Replace the file in one step, so that a run that is cut short leaves what it had."""
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps({**about, "records": list(records)}, indent=1) + "\n")
    os.replace(scratch, path)
