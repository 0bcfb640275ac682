"""Reads the *.losses of ab_gpu.sh in a folder: prints how far MoK is from the stock runs and writes losses.json and, with matplotlib, loss.png.

    python scripts/loss_curves.py FOLDER [RUN ...]      the runs that must be there; default: those that are

The spread of a step is the largest loss of the stock runs less the smallest. MoK passes where its largest distance from a stock run, over all
steps, is at most twice the largest spread, and where the runs mok and mok_again have the same bits. Every run must have every step, and finite
losses. What is told beside it and decides nothing: for each run the steps at which it is farther from a stock run than twice the spread of that
very step, a stock run being measured against the other stock runs. Losses that training has driven apart cross by chance, so no run has few.
Exit code: 0 it passes, 1 it does not or it cannot be told (no run of MoK, fewer than two stock runs, a run that is not whole), 2 no
runs or no folder.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Sequence
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

    def spread_and_distance(name: str) -> tuple[list[float], list[float]]:
        """By step, of the stock runs but for `name`: their spread, and the run's largest distance from one of them."""
        others = [run for other, run in stock.items() if other != name]
        losses = [[run[step] for run in others] for step in steps]
        return [max(x) - min(x) for x in losses], [max(abs(runs[name][step] - y) for y in x) for step, x in zip(steps, losses, strict=True)]

    measured = {name: spread_and_distance(name) for name in [*ours, *(stock if len(stock) > 2 else ())]}
    spread = measured[ours[0]][0]
    answer["largest spread of stock"] = max(spread)
    answer["mean spread of stock"] = sum(spread) / len(spread)
    distances = {name: measured[name][1] for name in ours}
    answer["distance from stock"] = {name: {"largest": max(off), "mean": sum(off) / len(off)} for name, off in distances.items()}
    answer["steps farther than twice their own spread"] = {
        name: sum(off > 2 * apart for apart, off in zip(*both, strict=True)) for name, both in measured.items()
    }
    near = all(max(off) <= 2 * max(spread) for off in distances.values())
    answer["passed"] = near and not answer.get("mok and mok_again", "").startswith("differ")
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
