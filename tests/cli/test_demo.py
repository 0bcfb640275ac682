"""``mok-megatron demo`` as a user runs it: real processes, Megatron's model, both backends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT, Result, write_tree

Mok = Callable[..., Result]
SHORT = ("demo", "--steps", "6", "--hidden-size", "64", "--ffn-hidden-size", "64", "--seq-length", "32", "--out", "report")


def plant(tmp_path: Path, code: str) -> Path:
    """A folder for the Python path that runs ``code`` on a rank once Megatron and MoK are about to be used."""
    lines = "".join(f"    {line}\n" for line in code.strip().splitlines())
    return write_tree(tmp_path / "planted", {"sitecustomize.py": f"{HOOK}\ndef plant():\n{lines}"})


HOOK = """
import sys
class AfterTrainModule:
    def find_spec(self, name, path=None, target=None):
        if name == "mok_megatron.demo.train":
            sys.meta_path.remove(self)
            plant()
sys.meta_path.insert(0, AfterTrainModule())
"""


def test_mok_agrees_with_alltoall_in_bf16(mok: Mok, tmp_path: Path) -> None:
    result = mok(*SHORT)
    assert result.code == 0, result
    assert "MoK runs on the CPU executor: no NVIDIA GPU found" in result.err or "left unused" in result.err
    assert "24/24" in result.err  # the progress bar: four runs of six steps
    folder = tmp_path / "cwd" / "report"
    assert sorted(path.name for path in folder.iterdir()) == ["loss.png", "report.json", "report.md"]
    assert (folder / "report.md").read_text() in result.out
    report = json.loads((folder / "report.json").read_text())
    for name, run in report["runs"].items():
        assert len(run["losses"]) == 6 and run["losses"][-1] < run["losses"][0]
        assert [layer["is_mok"] for layer in run["layers"]] == [name == "mok"] * 2
        # 2 ranks, 2 microbatches of 2 samples, 32 tokens, 4 routes, 6 steps: none dropped, none twice
        assert [sum(counts) for counts in run["tokens_per_expert"]] == [2 * 2 * 2 * 32 * 4 * 6] * 2
    assert report["floor"] > 0
    assert report["largest_loss_difference"] > 0  # bit-equal losses would mean that AllToAll ran twice


def test_mok_agrees_with_alltoall_in_fp32_and_another_shape(mok: Mok, tmp_path: Path) -> None:
    result = mok(*SHORT, "--dtype", "fp32", "--num-experts", "12", "--topk", "3", "--num-layers", "3", "--seed", "7")
    assert result.code == 0, result
    report = json.loads((tmp_path / "cwd" / "report" / "report.json").read_text())
    assert len(report["runs"]["mok"]["layers"]) == 3
    assert report["limit"] < 1e-3  # of losses around 5: an fp32 comparison is not a loose one


PLANTED = {
    "output": "functional.forward = lambda *a, **k: (lambda y, ctx: (y * 1.001, ctx))(*forward(*a, **k))",
    "router-gradient": "functional.backward = lambda *a, **k: (lambda dx, dp, *dw: (dx, dp * 0, *dw))(*backward(*a, **k))",
    "input-gradient": "functional.backward = lambda *a, **k: (lambda dx, *rest: (dx * 0.99, *rest))(*backward(*a, **k))",
}


@pytest.mark.parametrize("name", PLANTED)
def test_exit_code_turns_on_a_planted_error(mok: Mok, tmp_path: Path, name: str) -> None:
    code = f"""
from mok_megatron import functional
forward, backward = functional.forward, functional.backward
{PLANTED[name]}
"""
    result = mok(*SHORT, "--dtype", "fp32", path=(plant(tmp_path, code),))
    assert result.code == 1, result
    assert "**FAILED.**" in result.out and "more than 4 times the floor" in result.out


def test_says_which_package_is_missing(mok: Mok, tmp_path: Path) -> None:
    hide = """
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in ("megatron.core", "tqdm") else find_spec(name, package)
"""
    result = mok("demo", path=(write_tree(tmp_path / "hidden", {"sitecustomize.py": hide}),))
    assert result.code == 2, result
    assert "the demo needs megatron-core and tqdm, not installed here" in result.err


def test_a_failing_rank_fails_the_command(mok: Mok, tmp_path: Path) -> None:
    code = """
from mok_megatron import functional
def forward(*args, **kwargs):
    import torch.distributed as dist
    if dist.get_rank() == 1:
        raise RuntimeError("planted failure of rank 1")
    return stock(*args, **kwargs)
stock, functional.forward = functional.forward, forward
"""
    result = mok(*SHORT, path=(plant(tmp_path, code),))
    assert result.code == 3, result
    assert "planted failure of rank 1" in result.err
    assert processes_of(tmp_path) == []
    assert list((tmp_path / "cwd" / "report").iterdir()) == []


def test_a_hanging_rank_ends_with_the_time_limit(mok: Mok, tmp_path: Path) -> None:
    started = time.monotonic()
    result = mok(*SHORT, "--timeout-seconds", "5", path=(plant(tmp_path, "import time\ntime.sleep(600)"),))
    assert result.code == 3, result
    assert "not finished after --timeout-seconds 5" in result.err
    assert time.monotonic() - started < 60
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL], ids=lambda ending: ending.name)
def test_ranks_end_with_their_parent(tmp_path: Path, ending: signal.Signals) -> None:
    """The parent is killed while SIGINT is ignored, as in a background job of a script."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    code = "import os, pathlib, time\npathlib.Path(os.environ['TMPDIR'], f'rank-{os.getpid()}').touch()\ntime.sleep(600)"
    paths = os.pathsep.join(map(str, (plant(tmp_path, code), ROOT)))
    parent = subprocess.Popen(
        ["/bin/sh", "-c", 'trap "" INT; exec "$0" "$@"', sys.executable, "-m", "mok_megatron.cli", *SHORT],
        cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert eventually(lambda: len(list(temporary.glob("rank-*"))) == 2, seconds=60)
        assert list(temporary.glob("mok-demo-*")) != []
        parent.send_signal(ending)
        assert parent.wait(timeout=10) == -ending
        assert eventually(lambda: processes_of(tmp_path) == [], seconds=5), processes_of(tmp_path)
        assert list(temporary.glob("mok-demo-*")) == []
    finally:
        parent.kill()
        parent.wait()
        for rank in temporary.glob("rank-*"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(rank.name.removeprefix("rank-")), signal.SIGKILL)


def eventually(holds: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_one_expert_a_token_trains(mok: Mok) -> None:
    """Megatron wants the softmax before the choice of a single expert. One step: the code of the answer is not looked at."""
    result = mok(*SHORT, "--steps", "1", "--topk", "1", "--num-experts", "1", "--ranks", "1", "--num-layers", "1")
    assert result.code in (0, 1) and "## Tokens per expert" in result.out, result


def processes_of(folder: Path) -> list[str]:
    """Command lines of the processes that have ``folder`` in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text())
        except OSError:
            continue  # ended, or another user's
    return found
