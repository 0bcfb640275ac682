"""The bar chart: TFLOP/s of every row, by shape, a panel a phase."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mok_megatron.bench.phases import PHASES


def write_chart(path: Path, records: Sequence[dict[str, Any]]) -> str | None:
    """Write the PNG; returns None, or in a line why there is none."""
    try:
        import matplotlib
    except ImportError:
        return f"{path.name} was not written: matplotlib is not installed"
    timed = {row["name"]: row["label"] for record in records for row in record["rows"] if row["tflops"] is not None}
    if not timed:
        return f"{path.name} was not written: no row was timed"
    matplotlib.use("Agg")
    from matplotlib import patches, pyplot

    phases = [phase for phase in PHASES if any(row["phase"] == phase and row["tflops"] for record in records for row in record["rows"])]
    width = 0.8 / len(timed)
    size = (max(6.0, 2.0 + 0.35 * len(records) * len(timed)), 1.2 + 3.4 * len(phases))
    figure, panels = pyplot.subplots(len(phases), figsize=size, layout="constrained", squeeze=False, sharex=True)
    names = [f"{record['model']}\n{record['workload']}, {record['tokens_per_gpu']} tokens" for record in records]
    for axes, phase in zip(panels[:, 0], phases, strict=True):
        for place, name in enumerate(timed):
            wanted = (name, phase)
            points = [(x, r) for x, record in enumerate(records) for r in record["rows"] if (r["name"], r["phase"]) == wanted and r["tflops"]]
            heights = [row["tflops"] for _, row in points]
            times = [row["milliseconds"] for _, row in points]
            spread = [
                [max(0.0, h - h * t["median"] / t["p90"]) for h, t in zip(heights, times, strict=True)],
                [max(0.0, h * t["median"] / t["p10"] - h) for h, t in zip(heights, times, strict=True)],
            ]
            left = [x + (place - (len(timed) - 1) / 2) * width for x, _ in points]
            axes.bar(left, heights, width * 0.92, yerr=spread, color=f"C{place}", error_kw={"lw": 0.8})
        axes.set_ylabel(f"TFLOP/s a GPU\n{phase}, unpadded routes")
        axes.grid(axis="y", alpha=0.3)
    panels[-1, 0].set_xticks(range(len(records)), names, fontsize=8)
    panels[0, 0].set_title(f"MoE layer at EP {records[0]['ep']}: median, p10 to p90 of the slowest rank")
    marks = [patches.Patch(color=f"C{place}", label=label) for place, label in enumerate(timed.values())]
    figure.legend(handles=marks, fontsize=8, ncols=min(len(timed), 2), loc="outside lower center")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return None
