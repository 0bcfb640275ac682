"""Scripts for GPUs say in a line what they lack, before anything starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name not in ("MEGATRON_LM", "MOK_PYTHON", "LOCAL_RANK", "WORLD_SIZE")}
    environ |= {"PYTHONPATH": str(SCRIPTS.parent), "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)


def interpreter(folder: Path, body: str) -> str:
    """A stand-in for Python that prints what `body`, a shell case on its last argument, says."""
    fake = folder / "python"
    fake.write_text(f'#!/bin/sh\ncase "$2" in\n{body}\nesac\n')
    fake.chmod(0o755)
    return str(fake)


@pytest.mark.parametrize("script", ["pretrain_gpu.sh", "ab_gpu.sh"])
def test_what_a_run_of_megatron_lacks(script: str, tmp_path: Path) -> None:
    command = (str(SCRIPTS / script), *([str(tmp_path / "out")] if script == "ab_gpu.sh" else []))
    (tmp_path / "pretrain_gpt.py").write_text("")
    here = {"MEGATRON_LM": str(tmp_path)}
    no_gpu = interpreter(tmp_path, "*find_spec*) echo ;;\n*device_count*) echo 0 ;;")
    for environment, said in (
        ({}, "MEGATRON_LM is not set"),
        ({"MEGATRON_LM": "/nowhere"}, "MEGATRON_LM is '/nowhere', where there is no pretrain_gpt.py"),
        *(
            ({**here, "MASTER_PORT": port}, f"MASTER_PORT is '{port}'; it must be a number from 1 to 65535")
            for port in ("localhost", "08000", "2950x", "65536", "-1", "29500 ")
        ),
        ({**here, "MOK_PYTHON": "/nowhere/python"}, "'/nowhere/python' does not run; MOK_PYTHON must be a Python interpreter"),
        ({**here, "MOK_PYTHON": sys.executable}, f"{sys.executable} lacks: transformer_engine"),
        ({**here, "MOK_PYTHON": no_gpu}, "needs a GPU, none found"),
    ):
        done = run(*command, **environment)
        assert done.returncode == 2, (environment, done)
        assert done.stdout == "" and done.stderr.startswith(f"{script}: {said}") and len(done.stderr.splitlines()) == 1, (environment, done)
    assert not (tmp_path / "out").exists()


def test_an_ab_of_nothing(tmp_path: Path) -> None:
    """HybridEP alone, where it cannot be imported: told, and losses of earlier runs stay."""
    (tmp_path / "pretrain_gpt.py").write_text("")
    kept = tmp_path / "mok.losses"
    kept.write_text("1 2.0 0x1p+1 1.0\n")
    python = interpreter(tmp_path, "*find_spec*) echo ;;\n*device_count*) echo 1 ;;\n*deep_ep*) exit 1 ;;")
    done = run(str(SCRIPTS / "ab_gpu.sh"), str(tmp_path), "hybridep", MEGATRON_LM=str(tmp_path), MOK_PYTHON=python)
    assert done.returncode == 2 and done.stderr == "ab_gpu.sh: no other run was asked for\n", done
    assert kept.exists()


@pytest.mark.parametrize(("gpus", "visible", "groups"), [(1, "", ["0"]), (1, "5", ["5"]), (3, "", ["0,1"]), (5, "7,2,4,0,1", ["7,2", "4,0"])])
def test_gpus_of_each_run(gpus: int, visible: str, groups: list[str], tmp_path: Path) -> None:
    """One expert-parallel group of two GPUs, or of the only one; runs of the A/B side by side take different GPUs and ports."""
    (tmp_path / "pretrain_gpt.py").write_text("")
    started = tmp_path / "started"
    count = f"*device_count*) IFS=,; set -- ${{CUDA_VISIBLE_DEVICES:-{','.join('x' * gpus)}}}; echo $# ;;"
    starts = f'torch.distributed.run) echo "$CUDA_VISIBLE_DEVICES|$MASTER_PORT|$*" >>{started} ;;'
    python = interpreter(tmp_path, f"*find_spec*) echo ;;\n{count}\n{starts}")
    environment = {"MEGATRON_LM": str(tmp_path), "MOK_PYTHON": python, "CUDA_VISIBLE_DEVICES": visible, "MASTER_PORT": "4000"}
    done = run(str(SCRIPTS / "ab_gpu.sh"), str(tmp_path / "out"), "mok", "alltoall", **environment)
    assert done.returncode == 0, done
    ranks = len(groups[0].split(","))
    lines = sorted(started.read_text().splitlines())
    wanted = sorted((groups[i % len(groups)], 4000 + i % len(groups), backend) for i, backend in enumerate(("mok", "alltoall")))
    assert [(line.split("|")[0], int(line.split("|")[1]), line.rpartition("--moe-backend=")[2].split()[0]) for line in lines] == wanted
    for line in lines:
        assert f" --nproc-per-node {ranks} " in line and f" --expert-model-parallel-size {ranks} " in line, line


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["megatron_layer.py"], {}, "must be started by torchrun"),
        (["megatron_layer.py"], {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "needs a GPU a process, 2 in all, 0 found"),
        (["megatron_discrepancy.py"], {}, "'' is no checkout of Megatron-LM"),
        (["loss_log.py"], {}, "LOSSES.txt"),
    ],
)
def test_python_scripts_say_what_they_lack(arguments: list[str], environment: dict[str, str], said: str) -> None:
    done = run(sys.executable, str(SCRIPTS / arguments[0]), *arguments[1:], **environment)
    assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr, done
