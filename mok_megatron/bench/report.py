"""From row results to numbers, a table and JSON.

A record is one (shape, workload, tokens) on all ranks, as it stands in the JSON file:

    model, hidden_size, intermediate_size, topk, experts_per_gpu, ep, workload, tokens_per_gpu, seed, config (knobs of MoK)
    routes                 of the whole group
    busiest_rank_share     rows of the busiest rank over the mean
    padding_share          share of MoK's rows that pad an expert to 128
    rows[]                 one a row and phase:
                           name, label, phase ("forward", "forward+backward", "backward"), status ("ok", "wrong", "failed", "skipped"; what
                           is skipped, and what fails before its first call, stands under its first phase alone), reason, is_layer,
                           error, tolerance          the largest error of the sample beside what is allowed, see oracle.py and gradients.py;
                                                     of several outputs the one that is furthest out
                           milliseconds              median, p10, p90 of the slowest rank
                           ratio_to_bare             the same of the quotients by bare in the same phase, round by round; ratio_is_tie: 1 lies
                                                     between p10 and p90
                           tflops                    6 H I a route forward, 12 backward, 18 both; padding not counted, the mean rank's
                                                     routes over the median
                           remote_bytes              received from other ranks by the busiest one, there and back; as much again for a
                                                     backward behind its forward
                           host_us                   median, p10, p90 that one of several calls in a row keeps the host; null where it waits
                           host_us_first_call        the same of a call after a wait, as the timed ones are
                           launches_hidden           the host was faster than the filler that hides it; null where it waits
                           samples_ms                every round
    schedule_share         median of the schedule over that of MoK's forward
    exposed_communication_us  by phase: median, p10, p90 of MoK minus MoK at EP 1 with the same rows, round by round
    copy_bytes_per_second  read and written by a large copy on the device, measured in this run
    main_grad              bytes read and written (twice the size of the fp32 gradients of all weights), milliseconds that takes at that
                           rate; null without a backward
    replay                 where mok, mok_replay and mok_repeated were timed in the backward, else null; median, p10, p90, round by round:
                           more_ms                   of mok_replay minus mok
                           repeated_ms               of mok_repeated, times replayed_rows / recomputed_rows. It has a launch, a copy of the
                                                     inputs and a start and end with the other ranks of its own; the replay has none of these
                           overhead                  of more / repeated - 1
                           replayed_rows, recomputed_rows  of the busiest rank, with its padding: its second macrobatch, which mok_replay
                                                     makes again, and its first, which mok_repeated makes again
    memory                 of MoK: context_bytes (of one call, measured) beside promised_context_bytes = macrobatch_rows (H + 2I) bytes an
                           element, and workspace_bytes by purpose, once for all layers
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
from mok_megatron.bench.layer import Key, RowResult
from mok_megatron.bench.phases import BACKWARD, FORWARD, FORWARD_BACKWARD, PHASES
from mok_megatron.bench.problem import LayerProblem, Traffic, count_traffic
from mok_megatron.bench.rows.replay import replay_sizes
from mok_megatron.bench.timing import Spread


def make_record(
    problem: LayerProblem,
    results: dict[Key, RowResult],
    *,
    workload: str,
    tokens: int,
    seed: int,
    hides_us: float,
    copy_rate: float,
) -> dict[str, Any]:
    """One record out of the results by row name and phase. copy_rate: bytes a second."""
    traffic, shape = count_traffic(problem), problem.shape
    times = {key: [reading.milliseconds for reading in result.readings] for key, result in results.items() if result.readings}
    ordered = sorted(results, key=lambda key: PHASES.index(key[1]))
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
        "rows": [_row(problem, results[key], traffic, times.get(("bare", key[1])), hides_us) for key in ordered],
        "schedule_share": None,
        "exposed_communication_us": {},
        "copy_bytes_per_second": copy_rate,
        "main_grad": None,
        "replay": _replay(problem, *(times.get((name, BACKWARD)) for name in ("mok", "mok_replay", "mok_repeated"))),
        "memory": next((result.memory for result in results.values() if result.memory), None),
    }
    mok, schedule = times.get(("mok", FORWARD)), times.get(("mok_schedule", FORWARD))
    if mok and schedule:
        record["schedule_share"] = Spread.of(schedule).median / Spread.of(mok).median
    for phase in PHASES:
        mok, alone = times.get(("mok", phase)), times.get(("mok_ep1", phase))
        if mok and alone:
            differences = [(group - own) * 1e3 for group, own in zip(mok, alone, strict=True)]
            record["exposed_communication_us"][phase] = Spread.of(differences).to_dict()
    if any(phase != FORWARD for _, phase in results):
        moved = 2 * problem.main_grad.num_bytes
        record["main_grad"] = {"bytes": moved, "milliseconds": moved / copy_rate * 1e3}
    return record


def _replay(problem: LayerProblem, mok: list[float] | None, replay: list[float] | None, repeated: list[float] | None) -> dict[str, Any] | None:
    if not mok or not replay or not repeated:
        return None
    sizes = replay_sizes(problem)
    more = [two - one for two, one in zip(replay, mok, strict=True)]
    scaled = [time * sizes.replayed_rows / sizes.recomputed_rows for time in repeated]
    return {
        "more_ms": Spread.of(more).to_dict(),
        "repeated_ms": Spread.of(scaled).to_dict(),
        "overhead": Spread.of([own / floor - 1 for own, floor in zip(more, scaled, strict=True)]).to_dict(),
        "replayed_rows": sizes.replayed_rows,
        "recomputed_rows": sizes.recomputed_rows,
    }


def _row(problem: LayerProblem, result: RowResult, traffic: Traffic, bare: list[float] | None, hides_us: float) -> dict[str, Any]:
    row = result.row
    passes = 2 if result.phase == FORWARD_BACKWARD else 1
    wire = {"route": passes * traffic.remote_bytes_by_route, "token": passes * traffic.remote_bytes_by_token, "none": 0}
    entry: dict[str, Any] = {
        "name": row.name,
        "label": row.label,
        "phase": result.phase,
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
        entry["tflops"] = problem.shape.flops(result.phase, traffic.routes / problem.ranks.ep_size) / (spread.median * 1e-3) * 1e-12
        if bare is not None:
            ratio = Spread.of([own / floor for own, floor in zip(entry["samples_ms"], bare, strict=True)])
            entry["ratio_to_bare"] = ratio.to_dict()
            entry["ratio_is_tie"] = ratio.contains(1.0) and row.name != "bare"
    return entry


_COLUMNS = ("phase", "row", "ms (p10 to p90)", "over bare (p10 to p90)", "TFLOP/s", "remote MB", "host us (first call)", "error / tolerance")


_NAMES = _COLUMNS[:2]


def table(record: dict[str, Any]) -> str:
    """A record as text."""
    head = (
        f"{record['model']}: H {record['hidden_size']}, I {record['intermediate_size']}, K {record['topk']}, "
        f"{record['experts_per_gpu']} experts a GPU, EP {record['ep']}, {record['tokens_per_gpu']} tokens a GPU, {record['workload']}"
    )
    counts = f"busiest rank {record['busiest_rank_share']:.2f} of the mean, padding {record['padding_share']:.1%}"
    cells = [_COLUMNS, *(_cells(row) for row in record["rows"])]
    names = len(_NAMES)
    widths = [max(len(line[i]) for line in cells if len(line) == len(_COLUMNS) or i < names) for i in range(len(_COLUMNS))]
    lines = []
    for line in cells:  # a row that was not timed has its reason instead of the numbers
        left = [cell.ljust(width) for cell, width in zip(line[:names], widths, strict=False)]
        timed = len(line) == len(_COLUMNS)
        numbers = [cell.rjust(width) for cell, width in zip(line[names:], widths[names:], strict=True)] if timed else line[names:]
        lines.append("  ".join([*left, *numbers]))
    return "\n".join([head, counts, *(line.rstrip() for line in lines), *_tail(record)])


def _tail(record: dict[str, Any]) -> list[str]:
    """What belongs to no single row."""
    lines = []
    if record["schedule_share"] is not None:
        lines.append(f"schedule {record['schedule_share']:.1%} of MoK's forward")
    for phase, spread in record["exposed_communication_us"].items():
        lines.append(f"exposed communication, {phase}: {_microseconds(spread)}")
    if record["main_grad"] is not None:
        rate = record["copy_bytes_per_second"]
        lines.append(
            f"main_grad: reading and writing {record['main_grad']['bytes'] / 2e9:.4g} GB of fp32 weight gradients takes "
            f"{record['main_grad']['milliseconds']:.3f} ms at the {rate / 1e12:.3g} TB/s of a copy in this run"
        )
    if record["replay"] is not None:
        replay = record["replay"]
        lines.append(
            f"replay: the backward takes {_microseconds(replay['more_ms'], 1e3)} more with one macrobatch of {replay['replayed_rows']} rows "
            f"replayed, the forward tasks that it repeats {_microseconds(replay['repeated_ms'], 1e3)}, a launch and a start of their own in "
            "it: overhead {median:.1%} ({p10:.1%} to {p90:.1%})".format(**replay["overhead"])
        )
    if record["memory"] is not None:
        memory = record["memory"]
        lines.append(
            f"memory: MoK keeps {memory['context_bytes'] / 1e6:.4g} MB a layer and call for the backward, {memory['macrobatch_rows']} rows of "
            f"H + 2I elements are {memory['promised_context_bytes'] / 1e6:.4g}; its workspace, once for all layers, is "
            f"{sum(memory['workspace_bytes'].values()) / 1e6:.4g} MB"
        )
    return lines


def _microseconds(spread: dict[str, float], unit: float = 1.0) -> str:
    """unit: microseconds in one of the spread's numbers."""
    return "{median:.0f} us ({p10:.0f} to {p90:.0f})".format(**{name: number * unit for name, number in spread.items()})


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if row["status"] != "ok":
        return (row["phase"], row["label"], f"{row['status']}: {row['reason']}")
    time, ratio, host = row["milliseconds"], row["ratio_to_bare"], row["host_us"]
    over_bare = "" if ratio is None else "{median:.3f} ({p10:.3f} to {p90:.3f})".format(**ratio) + (" tie" if row["ratio_is_tie"] else "")
    remote = row["remote_bytes"]
    hidden = "" if row["launches_hidden"] else ", not hidden"
    host_text = "waits for GPU" if host is None else f"{host['median']:.0f} ({row['host_us_first_call']['median']:.0f}{hidden})"
    return (
        row["phase"],
        row["label"],
        "{median:.3f} ({p10:.3f} to {p90:.3f})".format(**time),
        over_bare,
        "" if row["tflops"] is None else f"{row['tflops']:.4g}",
        "" if remote is None else f"{remote / 1e6:.4g}",
        host_text,
        "exact" if row["tolerance"] == 0 else f"{row['error']:.1e} / {row['tolerance']:.1e}",
    )


def skews(records: Sequence[dict[str, Any]]) -> list[str]:
    """What a skewed workload costs MoK beside the uniform one, beyond what the busiest rank's share of the rows explains: a line a phase."""
    lines = []
    for record in records:
        same = [r for r in records if all(r[key] == record[key] for key in ("model", "tokens_per_gpu"))]
        uniform = next((r for r in same if r["workload"] == "uniform"), None)
        if uniform is None or record is uniform:
            continue
        share = record["busiest_rank_share"] / uniform["busiest_rank_share"]
        for phase in PHASES:
            skewed, even = _mok_median(record, phase), _mok_median(uniform, phase)
            if skewed is not None and even is not None:
                lines.append(
                    f"{record['model']}, {record['tokens_per_gpu']} tokens a GPU, {phase}: MoK takes {skewed / even:.3f} of uniform on "
                    f"{record['workload']}, {skewed / even / share:.3f} for the rows of the busiest rank"
                )
    return lines


def _mok_median(record: dict[str, Any], phase: str) -> float | None:
    rows = (row for row in record["rows"] if (row["name"], row["phase"]) == ("mok", phase) and row["milliseconds"])
    return next((row["milliseconds"]["median"] for row in rows), None)


def failures(records: Sequence[dict[str, Any]]) -> list[str]:
    """Rows that are wrong or failed, one line each."""
    return [
        f"{record['model']}, {record['workload']}, {row['label']}, {row['phase']}: {row['status']}: {row['reason']}"
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
