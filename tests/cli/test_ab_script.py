"""scripts/ab_cpu.sh: the documented A/B through the launcher, as its user runs it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _run(*flags: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MOK_VENV": sys.prefix, "PYTHONPATH": str(ROOT)}
    command = [str(ROOT / "scripts" / "ab_cpu.sh"), *flags]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.skipif(importlib.util.find_spec("megatron.training") is None, reason="this megatron-core has no megatron.training in its package")
def test_both_backends_train_and_agree() -> None:
    done = _run("--train-iters", "3")
    assert done.returncode == 0, done.stderr[-4000:]
    alltoall, mok = done.stdout.split("--moe-backend=mok\n")
    assert "MoE backend: megatron with the alltoall dispatcher" in alltoall and "MoE backend: mok" in mok
    losses = [[float(value) for value in re.findall(r"loss ([0-9.]+)", text)] for text in (alltoall, mok)]
    assert len(losses[0]) == len(losses[1]) == 3
    # FP32: what another order of sums does to a loss of about 4 in three steps; the printed digits end at 1e-7.
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_without_an_environment_it_says_what_to_do(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(ROOT / "scripts" / "ab_cpu.sh")], env={**os.environ, "MOK_VENV": str(tmp_path)}, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2 and "run ./scripts/quickstart.sh first" in done.stderr


def test_without_megatrons_parser_it_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "torchrun").touch(mode=0o755)
    (tmp_path / "bin" / "python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin" / "python").chmod(0o755)
    done = subprocess.run(
        [str(ROOT / "scripts" / "ab_cpu.sh")], env={**os.environ, "MOK_VENV": str(tmp_path)}, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2 and "make it with Python 3.12 or 3.13" in done.stderr
