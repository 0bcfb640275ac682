"""scripts/gpu_tests.sh with stand-ins for the GPU's tools: what it makes of the sanitizer's word."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOOD = "finite, and the same bits twice"
CHECKS = ("memcheck 1", "racecheck 1", "memcheck 2")
STANDINS = {
    "nvidia-smi": "echo one; echo two",
    "python": "exit 0",
    # --tool TOOL ... RANKS
    "compute-sanitizer": f"""[ "$2 ${{@: -1}}" = "memcheck 1" ] && eval "$FIRST_CHECK" && exit 1
echo "{GOOD}"; echo "========= $2 SUMMARY: 0 errors" """,
}


@pytest.mark.parametrize(
    ("first_check", "quoted"),
    [
        (
            "for i in {1..9999}; do echo ========= Invalid read number $i; done; echo ERROR SUMMARY: 9999 errors",
            "Invalid read number 60",
        ),
        ("true", None),
        (f"echo {GOOD}", GOOD),
        (f"echo {GOOD}; echo ========= ERROR SUMMARY: 2 errors; echo =========     Host Frame: of torch", "SUMMARY: 2 errors"),
    ],
    ids=["many errors", "no output", "no summary", "an error after the end"],
)
def test_one_check_that_fails_hides_no_other(tmp_path: Path, first_check: str, quoted: str | None) -> None:
    for name, body in STANDINS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment |= {"PATH": f"{tmp_path}:{environment['PATH']}", "MOK_PYTHON": str(tmp_path / "python"), "FIRST_CHECK": "false"}
    command = [str(ROOT / "scripts/gpu_tests.sh"), "forward"]
    good = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert good.returncode == 0 and good.stdout.count("SUMMARY: 0 errors") == len(CHECKS), good.stdout + good.stderr
    bad = subprocess.run(command, env=environment | {"FIRST_CHECK": first_check}, capture_output=True, text=True, timeout=60)
    assert bad.returncode == 1, bad.stdout + bad.stderr
    _, *shown = bad.stdout.split("compute-sanitizer, tool and ranks: ")
    assert tuple(part.splitlines()[0] for part in shown) == CHECKS
    assert quoted is None or quoted in shown[0]
    assert len(shown[0].splitlines()) <= 61 and "Host Frame" not in shown[0]
    assert all("SUMMARY: 0 errors" in part for part in shown[1:])


def test_an_interpreter_without_pytest(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    environment = os.environ | {"MOK_PYTHON": str(tmp_path / "python")}
    done = subprocess.run([str(ROOT / "scripts/gpu_tests.sh")], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "has no pytest" in done.stderr
