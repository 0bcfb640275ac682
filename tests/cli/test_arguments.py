"""Wrong arguments of the command and of the scripts: one line that names argument, value and rule; exit code 2; nothing started."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT, Result, write_tree

WRONG = [
    ("--steps 0", "--steps: 0 is not allowed; must be at least 1"),
    ("--ranks 9", "--ranks: 9 is not allowed; must be between 1 and 8"),
    ("--ranks 3", "--num-experts: 8 is not allowed; must be a positive multiple of --ranks (3)"),
    ("--seed -1", "--seed: -1 is not allowed; must be between 0 and 2147483647"),
    ("--dtype fp16", "--dtype: fp16 is not allowed; must be bf16 or fp32"),
    ("--num-layers 0", "--num-layers: 0 is not allowed; must be at least 1"),
    ("--num-experts 0", "--num-experts: 0 is not allowed; must be a positive multiple of --ranks (2)"),
    ("--topk 0", "--topk: 0 is not allowed; must be at least 1"),
    ("--topk 9", "--topk: 9 is not allowed; must be at most --num-experts (8)"),
    ("--topk 33 --num-experts 64", "--topk: 33 is not allowed; must be at most 32"),
    ("--hidden-size 100", "--hidden-size: 100 is not allowed; must be a positive multiple of 64"),
    ("--ffn-hidden-size -64", "--ffn-hidden-size: -64 is not allowed; must be a positive multiple of 64"),
    ("--seq-length 1", "--seq-length: 1 is not allowed; must be at least 2"),
    ("--micro-batch-size 0", "--micro-batch-size: 0 is not allowed; must be at least 1"),
    ("--num-microbatches 0", "--num-microbatches: 0 is not allowed; must be at least 1"),
    ("--timeout-seconds 0", "--timeout-seconds: 0.0 is not allowed; must be greater than 0"),
    ("--out file", "--out: file is not allowed; must be a folder, or a path that does not exist yet"),
    ("--steps many", "argument --steps: invalid int value: 'many'"),
    ("--stepz 3", "unrecognized arguments: --stepz 3"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_demo_refuses(mok: Callable[..., Result], tmp_path: Path, arguments: str, message: str) -> None:
    (tmp_path / "cwd" / "file").write_text("")
    result = mok("demo", *arguments.split())
    assert message in result.err, result
    assert result.code == 2
    assert result.out == "" and not (tmp_path / "cwd" / "mok-demo").exists()


def test_unknown_command(mok: Callable[..., Result]) -> None:
    result = mok("train")
    assert result.code == 2 and "invalid choice: 'train'" in result.err


def test_bench_is_one_of_the_commands(mok: Callable[..., Result]) -> None:
    assert "bench" in mok("--help").out
    result = mok("bench", "layer", "--help")
    assert result.code == 0 and "usage: mok-megatron bench layer" in result.out
    assert mok("bench").code == 2


def script(name: str, path: Path, **environment: str) -> Result:
    """Runs a script with nothing on the path but the shell's own tools and ``path``."""
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / name), "--steps", "1"],
        capture_output=True, text=True, timeout=60,
        env={"PATH": f"{path}:/usr/bin:/bin", "HOME": str(path), **environment},
    )  # fmt: skip
    return Result(done.returncode, done.stdout, done.stderr)


def fake_python(path: Path, version: str) -> Path:
    """An interpreter that tells its version and, asked for anything else, that it was used."""
    write_tree(path.parent, {path.name: f'#!/bin/sh\n[ "$1" = -c ] && echo {version} || {{ echo "used $0" >&2; exit 9; }}\n'})
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("name", ["quickstart.sh", "test.sh"])
def test_scripts_refuse_an_interpreter_that_does_not_run(tmp_path: Path, name: str) -> None:
    result = script(name, tmp_path, MOK_PYTHON="/nowhere/python")
    assert result.code == 2, result
    assert f"{name}: MOK_PYTHON is '/nowhere/python', which does not run" in result.err


def test_quickstart_refuses_an_old_interpreter(tmp_path: Path) -> None:
    old = fake_python(tmp_path / "old", "3.10")
    result = script("quickstart.sh", tmp_path, MOK_PYTHON=str(old))
    assert result.code == 2, result
    assert f"MOK_PYTHON is '{old}', which is Python 3.10; it must be one of: 3.12 3.13 3.11" in result.err


def test_quickstart_says_when_there_is_no_python(tmp_path: Path) -> None:
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        fake_python(tmp_path / name, "3.10")
    result = script("quickstart.sh", tmp_path)
    assert result.code == 2, result
    assert "none of these Python versions found, neither on PATH nor in pyenv: 3.12 3.13 3.11" in result.err


def test_quickstart_finds_3_12_in_pyenv_behind_a_shim_that_does_not_answer(tmp_path: Path) -> None:
    write_tree(tmp_path, {"python3.12": "#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n"})
    os.chmod(tmp_path / "python3.12", 0o755)
    fake_python(tmp_path / "python3.11", "3.11")
    wanted = fake_python(tmp_path / ".pyenv" / "versions" / "3.12.1" / "bin" / "python", "3.12")
    result = script("quickstart.sh", tmp_path, MOK_VENV=str(tmp_path / "venv"))
    assert f"with {wanted} (Python 3.12)" in result.err, result
    assert f"used {wanted}" in result.err
    assert result.code == 9


def test_quickstart_leaves_a_foreign_environment_alone(tmp_path: Path) -> None:
    wanted = fake_python(tmp_path / "new", "3.12")
    fake_python(tmp_path / "venv" / "bin" / "python", "3.11")
    result = script("quickstart.sh", tmp_path, MOK_PYTHON=str(wanted), MOK_VENV=str(tmp_path / "venv"))
    assert result.code == 2, result
    assert f"{tmp_path}/venv has Python 3.11, wanted is 3.12; remove that folder" in result.err
