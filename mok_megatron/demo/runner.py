"""Starts the demo's processes, watches them, and turns what they leave into the report and an exit code."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

from mok_megatron.demo import report
from mok_megatron.demo.settings import DemoSettings
from mok_megatron.errors import MoKUnsupportedError

EXIT_AGREES = 0
EXIT_DIFFERS = 1
EXIT_FAILED = 3
"""2 is the exit code of a wrong argument, as everywhere."""


def run_demo(settings: DemoSettings) -> int:
    """Trains, compares, writes the report into ``settings.out`` and prints it.

    Returns:
        0: MoK stayed within four times the floor. 1: it did not. 3: the training itself failed or took longer than
        ``settings.timeout_seconds``; no report is written then, and no process is left behind.

    Raises:
        MoKUnsupportedError: a package that the demo needs is not installed.
    """
    _require_packages()
    machine = _machine()
    # Training is for the CPU executor: Megatron must not pick a GPU for tensors that MoK then refuses.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    print(f"MoK runs on the {machine['executor']}: {machine['executor_reason']}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="mok-demo-") as scratch:
        error = _train(settings, scratch)
        if error is not None:
            print(f"mok-megatron demo: training failed\n{error}", file=sys.stderr)
            return EXIT_FAILED
        runs = json.loads(Path(scratch, "runs.json").read_text())
    summary = report.summarise(settings.to_dict(), machine, runs)
    paths = report.write(summary, settings.out)
    print(report.to_markdown(summary))
    print("written: " + ", ".join(str(path) for path in paths))
    return EXIT_AGREES if summary["passed"] else EXIT_DIFFERS


def _train(settings: DemoSettings, scratch: str) -> str | None:
    """Runs one process a rank. Returns None when all succeeded, else what went wrong; no process is left either way."""
    import torch.multiprocessing as multiprocessing

    deadline = time.monotonic() + settings.timeout_seconds
    context = multiprocessing.start_processes(
        _train_rank, args=(settings, scratch), nprocs=settings.ranks, join=False, start_method="spawn"
    )
    try:
        while not context.join(timeout=0.5):  # raises, after ending the others, when a process fails
            if time.monotonic() > deadline:
                return f"not finished after --timeout-seconds {settings.timeout_seconds:g}; all processes were ended"
    except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as error:
        return str(error).strip()
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()
    return None


def _train_rank(rank: int, settings: DemoSettings, scratch: str) -> None:
    from mok_megatron.demo.train import train_rank  # Megatron-Core is imported here, in the training process only

    train_rank(rank, settings, scratch)


def _require_packages() -> None:
    needed = {"megatron.core": "megatron-core", "matplotlib": "matplotlib", "tqdm": "tqdm"}
    missing = [package for module, package in needed.items() if not _is_installed(module)]
    if missing:
        raise MoKUnsupportedError(
            f"the demo needs {' and '.join(missing)}, not installed here; install mok-megatron with its extra: "
            "pip install '.[demo]'"
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that would hold it is missing
        return False


def _machine() -> dict[str, object]:
    import torch

    from mok_megatron import __version__
    from mok_megatron.build import ON_GPUS
    from mok_megatron.doctor import find_gpus

    gpus = find_gpus()
    reason = f"{len(gpus)} GPU(s) found and left unused: {ON_GPUS}" if gpus else "no NVIDIA GPU found"
    return {
        "executor": "CPU executor",
        "executor_reason": reason,
        "mok_megatron": __version__,
        "megatron-core": importlib.metadata.version("megatron-core"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
    }
