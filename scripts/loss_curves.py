"""Reads the *.losses of ab_gpu.sh in a folder: prints how far MoK is from the stock runs and writes losses.json and, with matplotlib, loss.png.

    python scripts/loss_curves.py FOLDER [RUN ...]      the runs that must be there; default: those that are

Spread: the largest loss of the stock runs less the smallest; distance: how far a run is from the stock run that is farthest from it. A run of
MoK passes where

* its distance at no step exceeds twice the largest spread of any step, and
* its mean over each 20 steps is no farther from a stock run's than twice the spread of such means, the largest of those 20 steps and of the 20
  on either side: while the loss falls to a hundredth, the spread of the start would hide anything later.

mok and mok_again must have the same bits; every run must have every step, and finite losses. Told beside it: the same quotients for each stock
run, measured against the other ones. With few stock runs theirs exceed two as well, since curves cross by chance.
Exit code: 0 it passes, 1 it does not or it cannot be told (no run of MoK, fewer than two stock runs, a run that is not whole), 2 no
runs or no folder.
"""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

STOCK = ("alltoall", "alltoall_deterministic", "allgather", "hybridep", "moved", "moved_again")
OURS = ("mok", "mok_again", "mok_fast", "mok_moved")
WINDOW = 20


def read(folder: Path) -> dict[str, dict[int, float]]:
    """Losses by run and iteration; empty runs are left out."""
    found = {}
    for path in sorted(folder.glob("*.losses")):
        rows = [line.split() for line in path.read_text().splitlines()]
        if rows:
            found[path.stem] = {int(row[0]): float.fromhex(row[2]) for row in rows}
    return found


def summarise(runs: dict[str, dict[int, float]], asked: Sequence[str] = ()) -> dict[str, Any]:
    """What is printed, as JSON values. `passed` is None where it cannot be told, which `doubts` explain."""
    stock = {name: run for name, run in runs.items() if name in STOCK}
    ours = [name for name in OURS if name in runs]
    steps = sorted(set().union(*runs.values()))
    doubts = [f"{name} has no losses" for name in asked if name not in runs]
    doubts += [f"{name} has {len(run)} of {len(steps)} steps" for name, run in runs.items() if len(run) < len(steps)]
    doubts += [f"{name} has losses that are not finite" for name, run in runs.items() if not all(map(math.isfinite, run.values()))]
    if not ours or len(stock) < 2:
        doubts.append(f"there are {len(ours)} runs of MoK and {len(stock)} stock runs, of at least one and two")
    answer: dict[str, Any] = {"steps": {name: len(run) for name, run in runs.items()}, "passed": None, "doubts": doubts}
    answer["last loss"] = {name: run[max(run)] for name, run in runs.items()}
    if {"mok", "mok_again"} <= runs.keys():
        first, second = runs["mok"], runs["mok_again"]
        differing = [step for step in steps if second.get(step) != first.get(step)]
        answer["mok and mok_again"] = "the same bits at every step" if not differing else f"differ from iteration {differing[0]} on"
    if doubts:
        return answer

    curves = {name: [run[step] for step in steps] for name, run in runs.items()}
    windows = {
        name: [statistics.fmean(curve[first : first + WINDOW]) for first in range(0, len(curve), WINDOW)] for name, curve in curves.items()
    }
    measured = {
        name: measure(curves, windows, name, [other for other in stock if other != name])
        for name in [*ours, *(stock if len(stock) > 2 else ())]
    }
    answer["largest spread of stock"], answer["mean spread of stock"] = measured[ours[0]].spread
    answer["distance from stock"] = {name: {"largest": m.distance[0], "mean": m.distance[1]} for name, m in measured.items()}
    answer[f"distance by spread, means of {WINDOW} steps"] = {name: [round(q, 2) for q in m.quotients] for name, m in measured.items()}
    near = all(measured[name].distance[0] <= 2 * measured[name].spread[0] and max(measured[name].quotients) <= 2 for name in ours)
    answer["passed"] = near and not answer.get("mok and mok_again", "").startswith("differ")
    return answer


class Measured(NamedTuple):
    spread: tuple[float, float]
    """Of the stock runs, over all steps: the largest and the mean."""
    distance: tuple[float, float]
    """Of the run, likewise."""
    quotients: list[float]
    """By window: distance of the means over the spread of the means, the largest of the window and its neighbours."""


def measure(curves: dict[str, list[float]], windows: dict[str, list[float]], name: str, others: Sequence[str]) -> Measured:
    """A run against the others: by step, and by its windows' means."""

    def spread_and_distance(of: dict[str, list[float]]) -> tuple[list[float], list[float]]:
        columns = list(zip(*(of[other] for other in others), strict=True))
        return [max(x) - min(x) for x in columns], [max(abs(own - y) for y in x) for own, x in zip(of[name], columns, strict=True)]

    spread, distance = spread_and_distance(curves)
    apart, off = spread_and_distance(windows)
    nearby = [max(apart[max(0, i - 1) : i + 2]) for i in range(len(apart))]
    quotients = [d / s if s > 0 else (0.0 if d == 0 else math.inf) for d, s in zip(off, nearby, strict=True)]
    return Measured((max(spread), statistics.fmean(spread)), (max(distance), statistics.fmean(distance)), quotients)


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
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_dir():
        print("usage: loss_curves.py FOLDER [RUN ...], a folder with *.losses", file=sys.stderr)
        return 2
    folder, asked = Path(sys.argv[1]), sys.argv[2:]
    runs = read(folder)
    if asked:
        runs = {name: run for name, run in runs.items() if name in asked}
    if not runs:
        print(f"no losses in {folder}")
        return 2
    answer = summarise(runs, asked)
    print(json.dumps(answer, indent=1))
    (folder / "losses.json").write_text(json.dumps({"summary": answer, "losses": runs}))
    if importlib.util.find_spec("matplotlib") is not None:
        draw(runs, folder / "loss.png")
    else:
        print("no picture: matplotlib is not installed here; run this again where it is")
    return 0 if answer["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
