"""Wrong arguments of the command and of the scripts: one line that names argument, value and rule; exit code 2; nothing started."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mok_megatron.buffers import WorkspaceShape
from mok_megatron.demo.report import prepare
from mok_megatron.demo.settings import DemoSettings
from mok_megatron.errors import MoKArgumentError
from tests.cli.conftest import ROOT, Result, write_tree

MOST = 2**31 - 1
WRONG = [
    ("--steps 0", f"--steps: 0 is not allowed; must be between 1 and {MOST}"),
    (f"--steps {2**31}", f"--steps: {2**31} is not allowed; must be between 1 and {MOST}"),
    ("--steps 268435456", "--steps: 268435456 is not allowed; must be at most 268435455 with --ranks 2, --num-microbatches 2"),
    ("--ranks 0", "--ranks: 0 is not allowed; must be between 1 and 8"),
    ("--ranks 9", "--ranks: 9 is not allowed; must be between 1 and 8"),
    ("--ranks 3", "--num-experts: 8 is not allowed; must be a multiple of --ranks (3)"),
    ("--seed -1", f"--seed: -1 is not allowed; must be between 0 and {MOST}"),
    (f"--seed {2**31}", f"--seed: {2**31} is not allowed; must be between 0 and {MOST}"),
    ("--dtype fp16", "--dtype: fp16 is not allowed; must be bf16 or fp32"),
    ("--num-layers 0", f"--num-layers: 0 is not allowed; must be between 1 and {MOST}"),
    ("--num-experts 0", "--num-experts: 0 is not allowed; must be between 1 and 2048"),
    ("--num-experts 300 --ranks 1", "--num-experts: 300 is not allowed; must be at most 256: 256 on each of --ranks (1)"),
    ("--num-experts 514", "--num-experts: 514 is not allowed; must be at most 512: 256 on each of --ranks (2)"),
    ("--num-experts 2056 --ranks 8", "--num-experts: 2056 is not allowed; must be between 1 and 2048"),
    ("--topk 0", "--topk: 0 is not allowed; must be between 1 and 32"),
    ("--topk 9", "--topk: 9 is not allowed; must be at most --num-experts (8)"),
    ("--topk 33 --num-experts 64", "--topk: 33 is not allowed; must be between 1 and 32"),
    ("--hidden-size 0", f"--hidden-size: 0 is not allowed; must be between 64 and {MOST}"),
    ("--hidden-size 100", "--hidden-size: 100 is not allowed; must be a multiple of 64"),
    ("--ffn-hidden-size -64", f"--ffn-hidden-size: -64 is not allowed; must be between 64 and {MOST}"),
    ("--ffn-hidden-size 96", "--ffn-hidden-size: 96 is not allowed; must be a multiple of 64"),
    ("--seq-length 1", f"--seq-length: 1 is not allowed; must be between 2 and {MOST}"),
    ("--seq-length 268435456", "--micro-batch-size: 2 is not allowed; must be at most 1 with --seq-length 268435456 and --topk 4"),
    ("--micro-batch-size 0", f"--micro-batch-size: 0 is not allowed; must be between 1 and {MOST}"),
    ("--micro-batch-size 8388608", "--micro-batch-size: 8388608 is not allowed; must be at most 8388607 with --seq-length 64 and --topk 4"),
    ("--num-microbatches 0", f"--num-microbatches: 0 is not allowed; must be between 1 and {MOST}"),
    ("--timeout-seconds 0", "--timeout-seconds: 0.0 is not allowed; must be greater than 0 and at most 604800"),
    ("--timeout-seconds nan", "--timeout-seconds: nan is not allowed; must be greater than 0 and at most 604800"),
    ("--timeout-seconds inf", "--timeout-seconds: inf is not allowed; must be greater than 0 and at most 604800"),
    ("--steps many", "argument --steps: invalid int value: 'many'"),
    ("--stepz 3", "unrecognized arguments: --stepz 3"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_demo_refuses(mok: Callable[..., Result], tmp_path: Path, arguments: str, message: str) -> None:
    result = mok("demo", *arguments.split())
    assert message in result.err, result
    assert result.code == 2
    assert result.out == "" and not (tmp_path / "cwd" / "mok-demo").exists()


@pytest.mark.parametrize("out", ["file", "file/below", "taken", "x" * 300, "/proc/nope", "/sys"])
def test_demo_refuses_a_folder_that_it_could_not_write(mok: Callable[..., Result], tmp_path: Path, out: str) -> None:
    write_tree(tmp_path / "cwd", {"file": "", "taken/report.json/in-the-way": ""})
    result = mok("demo", "--out", out)
    assert result.code == 2, result
    assert result.err.startswith(f"mok-megatron demo: --out: {out} is not allowed; must be a folder that can be made and written to: ")
    assert result.err.count("\n") == 1 and result.out == ""
    assert (tmp_path / "cwd" / "file").read_text() == ""


def test_looking_at_the_folder_changes_no_earlier_report(tmp_path: Path) -> None:
    names = {"report.md": "old", "report.json": "{}", "notes.txt": "mine"}
    prepare(write_tree(tmp_path / "out", names))
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == names


# The backend's sizes: the most or least it takes, one step beyond, and both as settings of the demo.
EDGES = {
    "ranks": ({"ranks": 8}, {"ranks": 9, "num_experts": 9}),
    "experts": ({"num_experts": 256, "ranks": 1}, {"num_experts": 257, "ranks": 1}),
    "experts-of-8-ranks": ({"num_experts": 2048, "ranks": 8}, {"num_experts": 2056, "ranks": 8}),
    "topk": ({"topk": 32, "num_experts": 64}, {"topk": 33, "num_experts": 64}),
    "topk-of-few-experts": ({"topk": 8}, {"topk": 9}),
    "hidden": ({"hidden_size": 64}, {"hidden_size": 63}),
    "intermediate": ({"ffn_hidden_size": 192}, {"ffn_hidden_size": 191}),
    "routes": (
        {"seq_length": 2**15, "micro_batch_size": 2**14 - 1, "steps": 1},
        {"seq_length": 2**15, "micro_batch_size": 2**14, "steps": 1},
    ),
}


@pytest.mark.parametrize("name", EDGES)
def test_demo_takes_exactly_what_the_backend_takes(name: str) -> None:
    inside, outside = EDGES[name]
    DemoSettings(**inside)
    backend_shape(**inside)
    with pytest.raises(MoKArgumentError):
        backend_shape(**outside)
    with pytest.raises(MoKArgumentError):
        DemoSettings(**outside)


def backend_shape(**settings: int) -> WorkspaceShape:
    """The sizes that the demo's layers ask the backend for, without the demo's own checks."""
    values = {**{field.name: field.default for field in dataclasses.fields(DemoSettings)}, **settings}
    return WorkspaceShape(
        ep_size=values["ranks"],
        num_local_tokens=values["seq_length"] * values["micro_batch_size"],
        hidden_size=values["hidden_size"],
        topk=values["topk"],
        num_local_experts=values["num_experts"] // values["ranks"],
        intermediate_size=values["ffn_hidden_size"],
        dtype=torch.bfloat16,
    )


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
