"""Reads the *.losses of ab_gpu.sh in a folder: prints how far MoK is from the stock runs and writes losses.json and, with matplotlib, loss.png.

The spread of a step is the largest loss of the stock runs less the smallest. MoK passes where its largest distance from a stock run, over all
steps, is at most twice the largest spread. Exit code: 0 it passes (and runs that should have the same bits have), 1 it does not, 2 no runs.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

STOCK = ("alltoall", "alltoall_again", "allgather", "hybridep", "moved")
OURS = ("mok", "mok_again", "mok_fast")


def read(folder: Path) -> dict[str, dict[int, float]]:
    """Losses by run and iteration; empty runs are left out."""
    found = {}
    for path in sorted(folder.glob("*.losses")):
        rows = [line.split() for line in path.read_text().splitlines()]
        if rows:
            found[path.stem] = {int(row[0]): float.fromhex(row[2]) for row in rows}
    return found


def summarise(runs: dict[str, dict[int, float]]) -> dict[str, Any]:
    """What is printed, as JSON values."""
    stock = {name: run for name, run in runs.items() if name in STOCK}
    answer: dict[str, Any] = {"steps": {name: len(run) for name, run in runs.items()}, "passed": None}
    answer["last loss"] = {name: run[max(run)] for name, run in runs.items()}
    if len(stock) > 1:
        steps = sorted(set.intersection(*(set(run) for run in stock.values())))
        spread = {step: max(run[step] for run in stock.values()) - min(run[step] for run in stock.values()) for step in steps}
        answer["largest spread of stock"] = max(spread.values())
        answer["mean spread of stock"] = sum(spread.values()) / len(spread)
        distances = {}
        for name in OURS:
            if name in runs:
                off = [max(abs(runs[name][s] - run[s]) for run in stock.values()) for s in steps if s in runs[name]]
                distances[name] = {"largest": max(off), "mean": sum(off) / len(off), "steps": len(off)}
        answer["distance from stock"] = distances
        if distances:
            answer["passed"] = all(
                d["largest"] <= 2 * answer["largest spread of stock"] and d["steps"] == len(steps) for d in distances.values()
            )
    if {"mok", "mok_again"} <= runs.keys():
        first, second = runs["mok"], runs["mok_again"]
        differing = [step for step in first if second.get(step) != first[step]]
        answer["mok and mok_again"] = "the same bits at every step" if not differing else f"differ from iteration {differing[0]} on"
        answer["passed"] = answer["passed"] is not False and not differing and len(first) == len(second)
    return answer


def draw(runs: dict[str, dict[int, float]], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, differences) = pyplot.subplots(2, 1, figsize=(9, 8), sharex=True)
    base = runs.get("alltoall") or next(iter(runs.values()))
    for name, run in runs.items():
        losses.plot(list(run), list(run.values()), label=name, linewidth=1)
        shared = [step for step in run if step in base]
        differences.plot(shared, [run[s] - base[s] for s in shared], label=name, linewidth=1)
    losses.set_ylabel("lm loss")
    differences.set_ylabel("less alltoall's")
    differences.set_xlabel("iteration")
    losses.legend()
    figure.tight_layout()
    figure.savefig(target, dpi=120)


def main() -> int:
    folder = Path(sys.argv[1])
    runs = read(folder)
    if not runs:
        print(f"no losses in {folder}")
        return 2
    answer = summarise(runs)
    print(json.dumps(answer, indent=1))
    (folder / "losses.json").write_text(json.dumps({"summary": answer, "losses": runs}))
    if importlib.util.find_spec("matplotlib") is not None:
        draw(runs, folder / "loss.png")
    else:
        print("no picture: matplotlib is not installed here; run this again where it is")
    return 0 if answer["passed"] is not False else 1


if __name__ == "__main__":
    sys.exit(main())
