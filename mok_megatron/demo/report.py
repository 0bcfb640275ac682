"""The demo's verdict and its report: Markdown, JSON and a PNG. Knows nothing of how the runs were made."""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from mok_megatron.errors import MoKArgumentError

ALLOWED_MULTIPLE_OF_FLOOR = 4.0
_WARM_UP_STEPS = 2


def summarise(settings: dict[str, Any], machine: dict[str, Any], runs: dict[str, Any]) -> dict[str, Any]:
    """Compares the runs and decides.

    Args:
        settings: the demo's settings, as JSON values.
        machine: what ran it, as JSON values.
        runs: per run of ``train.RUNS`` its result.

    Returns:
        The whole report as JSON values. ``passed`` is whether MoK stayed within four times the floor, ran in every
        layer of its run and in none of the others, and trained to finite losses; ``failures`` has a sentence for each
        of these that does not hold.
    """
    losses = {name: run["losses"] for name, run in runs.items()}
    stock = losses["alltoall"]
    between_dispatchers = _largest_difference(stock, losses["allgather"])
    one_ulp = _largest_difference(stock, losses["alltoall_one_ulp"])
    floor = max(between_dispatchers, one_ulp)
    difference = _largest_difference(stock, losses["mok"])
    limit = ALLOWED_MULTIPLE_OF_FLOOR * floor

    failures = []
    for name, run in runs.items():
        if not all(math.isfinite(loss) for loss in run["losses"]):
            failures.append(f"run {name}: a loss is not finite")
        for layer in run["layers"]:
            if layer["is_mok"] != (run["backend"] == "mok"):
                failures.append(f"run {name}, layer {layer['number']}: asked for {run['backend']}, {layer['class']} ran")
    if not difference <= limit:
        failures.append(
            f"MoK's loss is up to {difference:.3e} away from AllToAll's, more than {ALLOWED_MULTIPLE_OF_FLOOR:g} times the floor of {floor:.3e}"
        )
    return {
        "passed": not failures,
        "failures": failures,
        "largest_loss_difference": difference,
        "floor": floor,
        "floor_between_dispatchers": between_dispatchers,
        "floor_inputs_moved_by_one_ulp": one_ulp,
        "limit": limit,
        "relative_gradient_norm_difference": {
            name: _largest_difference([1.0] * len(stock), _ratios(run["gradient_norms"], runs["alltoall"]["gradient_norms"]))
            for name, run in runs.items()
        },
        "settings": settings,
        "machine": machine,
        "runs": runs,
    }


def _largest_difference(a: list[float], b: list[float]) -> float:
    differences = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return math.nan if any(math.isnan(d) for d in differences) else max(differences)


def _ratios(a: list[float], b: list[float]) -> list[float]:
    return [x / y if y else math.nan for x, y in zip(a, b, strict=True)]


def step_time(run: dict[str, Any]) -> float:
    """Median seconds of a step, without the first steps where there are enough of them."""
    seconds = run["seconds_per_step"]
    return statistics.median(seconds[_WARM_UP_STEPS:] or seconds)


def to_markdown(report: dict[str, Any]) -> str:
    settings, machine, runs = report["settings"], report["machine"], report["runs"]
    norms = report["relative_gradient_norm_difference"]
    verdict = "**MoK agrees with AllToAll.**" if report["passed"] else "**FAILED.**"
    lines = [
        "# MoK and Megatron's AllToAll, one training with several backends",
        "",
        verdict,
        *(f"- {failure}" for failure in report["failures"]),
        "",
        "| largest difference of the loss over all steps | |",
        "|---|---|",
        f"| MoK to AllToAll | {report['largest_loss_difference']:.3e} |",
        f"| floor: AllGather to AllToAll, both Megatron's own | {report['floor_between_dispatchers']:.3e} |",
        f"| floor: AllToAll, input embedding moved by one unit in the last place | {report['floor_inputs_moved_by_one_ulp']:.3e} |",
        f"| allowed: {ALLOWED_MULTIPLE_OF_FLOOR:g} times the larger floor | {report['limit']:.3e} |",
        "",
        "For information, the largest relative difference of the gradient norm to AllToAll's: "
        + ", ".join(f"{name} {value:.1e}" for name, value in norms.items() if name != "alltoall"),
        "",
        "![losses](loss.png)",
        "",
        "## What ran",
        "",
        "| run | `--moe-backend` | the layers say | first loss | last loss | median step |",
        "|---|---|---|---|---|---|",
    ]
    for name, run in runs.items():
        says = sorted({f"`{layer['class']}` with `{layer['dispatcher']}`" for layer in run["layers"]})
        lines.append(
            f"| {name} | {run['backend']} | {', '.join(says)} | {run['losses'][0]:.4f} | {run['losses'][-1]:.4f} "
            f"| {step_time(run) * 1e3:.0f} ms |"
        )
    lines += [
        "",
        f"MoK ran on the {machine['executor']}: {machine['executor_reason']}.",
        "",
        "Times of a model this small, or on the CPU executor, say nothing about the speed of MoK.",
        "",
        "## Tokens per expert",
        "",
        "Routes over the whole run, all ranks; the router is Megatron's in every run.",
        "",
        "| run | layer | " + " | ".join(f"e{e}" for e in range(settings["num_experts"])) + " | max/mean |",
        "|---|---|" + "---|" * (settings["num_experts"] + 1),
    ]
    for name in ("alltoall", "mok"):
        for layer, counts in zip(runs[name]["layers"], runs[name]["tokens_per_expert"], strict=True):
            mean = sum(counts) / len(counts)
            cells = " | ".join(str(count) for count in counts)
            lines.append(f"| {name} | {layer['number']} | {cells} | {max(counts) / mean:.2f} |")
    lines += ["", "## Settings and machine", "", "| | |", "|---|---|"]
    lines += [f"| {key} | {value} |" for key, value in {**settings, **machine}.items()]
    return "\n".join(lines) + "\n"


def prepare(out: Path) -> None:
    """Makes the folder ``out`` and proves, changing nothing in it, that :func:`write` can write its files there.

    Raises:
        MoKArgumentError: it cannot be made, or one of the files cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out) as file:
            file.write(b"x")
        for path in _paths(out):
            if os.path.lexists(path):  # of an earlier run: opening it to append leaves it as it is
                path.open("ab").close()
    except OSError as error:
        raise MoKArgumentError(f"--out: {out} is not allowed; must be a folder that can be made and written to: {error}") from error


def write(report: dict[str, Any], out: Path) -> list[Path]:
    """Writes ``report.md``, ``report.json`` and ``loss.png`` into ``out``, a folder that :func:`prepare` has seen."""
    paths = _paths(out)
    paths[0].write_text(to_markdown(report))
    paths[1].write_text(json.dumps(report, indent=1))
    _plot(report, paths[2])
    return paths


def _paths(out: Path) -> list[Path]:
    return [out / "report.md", out / "report.json", out / "loss.png"]


def _plot(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = report["runs"]
    stock = runs["alltoall"]["losses"]
    steps = range(1, len(stock) + 1)
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(8, 7), sharex=True, layout="constrained")
    top.plot(steps, stock, label="AllToAll (Megatron)", linewidth=3, alpha=0.5)
    top.plot(steps, runs["mok"]["losses"], label="--moe-backend=mok", linestyle="--", color="black")
    top.set_ylabel("loss")
    top.legend()
    for name, label, style in (
        ("mok", "MoK", {"color": "black"}),
        ("allgather", "AllGather (floor)", {"alpha": 0.7}),
        ("alltoall_one_ulp", "AllToAll, inputs moved by one ulp (floor)", {"alpha": 0.7}),
    ):
        difference = [a - b for a, b in zip(runs[name]["losses"], stock, strict=True)]
        bottom.plot(steps, difference, label=label, **style)
    for sign in (1, -1):
        bottom.axhline(sign * report["limit"], color="red", linewidth=0.8, linestyle=":")
    bottom.set_ylabel("loss less AllToAll's loss")
    bottom.set_xlabel("step (red: four times the floor)")
    bottom.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
