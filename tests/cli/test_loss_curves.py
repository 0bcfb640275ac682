"""The verdict of scripts/ab_gpu.sh over runs whose losses are given here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT

STOCK = {"alltoall": 0.0, "allgather": 2e-3, "moved": -1e-3}
"""Distance of each stock run from a curve: their spread is 3e-3."""


def verdict(folder: Path, runs: dict[str, float], steps: int = 5, last: dict[str, float] | None = None) -> tuple[int, dict[str, object]]:
    for name, offset in runs.items():
        losses = [10 - 0.1 * step + offset + ((last or {}).get(name, 0.0) if step == steps - 1 else 0.0) for step in range(steps)]
        (folder / f"{name}.losses").write_text("".join(f"{i + 1} {x} {x.hex()} 1.0\n" for i, x in enumerate(losses)))
    done = subprocess.run([sys.executable, "scripts/loss_curves.py", str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    return done.returncode, json.loads((folder / "losses.json").read_text())["summary"]


def test_within_twice_the_spread_and_the_same_bits(tmp_path: Path) -> None:
    code, summary = verdict(tmp_path, {**STOCK, "mok": 4e-3, "mok_again": 4e-3})
    assert code == 0 and summary["passed"] is True
    assert summary["largest spread of stock"] == pytest.approx(3e-3)
    assert summary["distance from stock"]["mok"]["largest"] == pytest.approx(5e-3)
    assert (tmp_path / "loss.png").exists()


@pytest.mark.parametrize(
    "runs, last",
    [
        ({**STOCK, "mok": 6e-3}, {}),  # 7e-3 from the run below
        ({**STOCK, "mok": 0.0}, {"mok": 8e-3}),  # at one step
        ({**STOCK, "mok": 0.0, "mok_again": 0.0}, {"mok_again": 2**-40}),  # other bits
        ({**STOCK, "mok": float("nan")}, {}),
    ],
    ids=["too far", "too far once", "other bits", "not a number"],
)
def test_what_does_not_pass(tmp_path: Path, runs: dict[str, float], last: dict[str, float]) -> None:
    code, summary = verdict(tmp_path, runs, last=last)
    assert code == 1 and summary["passed"] is False


def test_no_runs(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "scripts/loss_curves.py", str(tmp_path)], cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode == 2
