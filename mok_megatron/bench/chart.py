"""The bar chart: TFLOP/s of every row, by shape."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


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
    from matplotlib import pyplot

    width = 0.8 / len(timed)
    figure, axes = pyplot.subplots(figsize=(max(6.0, 2.0 + 0.35 * len(records) * len(timed)), 4.8), layout="constrained")
    for place, (name, label) in enumerate(timed.items()):
        points = [(x, row) for x, record in enumerate(records) for row in record["rows"] if row["name"] == name and row["tflops"]]
        heights = [row["tflops"] for _, row in points]
        times = [row["milliseconds"] for _, row in points]
        spread = [
            [h - h * t["median"] / t["p90"] for h, t in zip(heights, times, strict=True)],
            [h * t["median"] / t["p10"] - h for h, t in zip(heights, times, strict=True)],
        ]
        left = [x + (place - (len(timed) - 1) / 2) * width for x, _ in points]
        axes.bar(left, heights, width * 0.92, yerr=spread, label=label, color=f"C{place}", error_kw={"lw": 0.8})
    first = records[0]
    names = [f"{record['model']}\n{record['workload']}, {record['tokens_per_gpu']} tokens" for record in records]
    axes.set_xticks(range(len(records)), names, fontsize=8)
    axes.set_ylabel("TFLOP/s a GPU, forward, unpadded routes")
    axes.set_title(f"MoE layer at EP {first['ep']}: median, p10 to p90 of the slowest rank")
    figure.legend(fontsize=8, ncols=min(len(timed), 2), loc="outside lower center")
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return None
