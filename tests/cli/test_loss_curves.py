"""The verdict of scripts/ab_gpu.sh over runs whose losses are given here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import ROOT

STOCK = {"alltoall": 0.0, "allgather": 2e-3, "moved": -1e-3}
"""Distance of each stock run from a curve: their spread is 3e-3."""


def verdict(
    folder: Path, runs: dict[str, float], steps: int = 5, last: dict[str, float] | None = None, asked: Sequence[str] = ()
) -> tuple[int, dict[str, Any]]:
    for name, offset in runs.items():
        losses = [10 - 0.1 * step + offset + ((last or {}).get(name, 0.0) if step == steps - 1 else 0.0) for step in range(steps)]
        (folder / f"{name}.losses").write_text("".join(f"{i + 1} {x} {x.hex()} 1.0\n" for i, x in enumerate(losses)))
    done = subprocess.run(
        [sys.executable, "scripts/loss_curves.py", str(folder), *asked], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    return done.returncode, json.loads((folder / "losses.json").read_text())["summary"]


def test_within_twice_the_spread_and_the_same_bits(tmp_path: Path) -> None:
    code, summary = verdict(tmp_path, {**STOCK, "mok": 4e-3, "mok_again": 4e-3})
    assert code == 0 and summary["passed"] is True
    assert summary["largest spread of stock"] == pytest.approx(3e-3)
    assert summary["distance from stock"]["mok"]["largest"] == pytest.approx(5e-3)
    # moved is 3e-3 from allgather, while alltoall and allgather are 2e-3 apart, and so on.
    quotients = {"mok": 5 / 3, "mok_again": 5 / 3, "alltoall": 2 / 3, "allgather": 3, "moved": 3 / 2}
    assert summary["distance by spread, means of 20 steps"] == {name: [pytest.approx(q, abs=0.01)] for name, q in quotients.items()}
    assert (tmp_path / "loss.png").exists()


@pytest.mark.parametrize(
    "runs, last",
    [
        ({**STOCK, "mok": 6e-3}, {}),  # 7e-3 from the run below
        ({**STOCK, "mok": 0.0}, {"mok": 8e-3}),  # at one step
        ({**STOCK, "mok": 0.0, "mok_again": 0.0}, {"mok_again": 2**-40}),  # other bits
    ],
    ids=["too far", "too far once", "other bits"],
)
def test_what_does_not_pass(tmp_path: Path, runs: dict[str, float], last: dict[str, float]) -> None:
    code, summary = verdict(tmp_path, runs, last=last)
    assert code == 1 and summary["passed"] is False


RECORDED = json.loads((ROOT / "docs" / "benchmarks" / "pretrain-loss.json").read_text())["losses"]


@pytest.mark.parametrize("fault", ["frozen at step 75", "frozen at step 150", "a tenth too high at the end", "0.5 too high", "none"])
def test_over_curves_of_a_training_run(tmp_path: Path, fault: str) -> None:
    """Losses of 200 steps that fall to a hundredth: what would be inside the spread of the first steps is no pass in the later ones."""
    runs = {name: [RECORDED[name][str(step)] for step in range(1, 201)] for name in STOCK}
    runs["mok"] = [sum(x) / len(x) for x in zip(*runs.values(), strict=True)]
    for step in range(200):
        if fault.startswith("frozen"):
            runs["mok"][step] = runs["mok"][min(step, int(fault.split()[-1]))]
        elif fault.startswith("a tenth"):
            runs["mok"][step] *= 1.1 if step >= 160 else 1.0
        elif fault.startswith("0.5"):
            runs["mok"][step] += 0.5
    for name, losses in runs.items():
        (tmp_path / f"{name}.losses").write_text("".join(f"{i + 1} {x} {x.hex()} 1.0\n" for i, x in enumerate(losses)))
    done = subprocess.run([sys.executable, "scripts/loss_curves.py", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == (0 if fault == "none" else 1), done.stdout


@pytest.mark.parametrize(
    "runs, asked, doubt",
    [
        ({**STOCK, "mok": float("nan"), "mok_again": 0.0}, [], "mok has losses that are not finite"),
        ({**STOCK, "alltoall": float("inf"), "mok": 0.0}, [], "alltoall has losses that are not finite"),
        ({**STOCK}, [], "there are 0 runs of MoK"),
        ({"alltoall": 0.0, "mok": 0.0, "mok_again": 0.0}, [], "and 1 stock runs"),
        ({**STOCK, "mok": 0.0}, [*STOCK, "mok", "mok_again"], "mok_again has no losses"),
    ],
    ids=["not a number", "stock not finite", "no MoK", "one stock run", "one that was asked is missing"],
)
def test_what_cannot_be_told_does_not_pass(tmp_path: Path, runs: dict[str, float], asked: list[str], doubt: str) -> None:
    code, summary = verdict(tmp_path, runs, asked=asked)
    assert code == 1 and summary["passed"] is None
    assert doubt in "; ".join(summary["doubts"])


@pytest.mark.parametrize("short", ["mok", "mok_again", "moved"])
def test_a_run_that_ended_early_does_not_pass(tmp_path: Path, short: str) -> None:
    assert verdict(tmp_path, {**STOCK, "mok": 0.0, "mok_again": 0.0})[0] == 0
    path = tmp_path / f"{short}.losses"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    done = subprocess.run([sys.executable, "scripts/loss_curves.py", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and f"{short} has 2 of 5 steps" in done.stdout


def test_no_runs(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "scripts/loss_curves.py", str(tmp_path)], cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode == 2
