"""Starts the demo's processes, watches them, and turns what they leave into the report and an exit code."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

from mok_megatron.demo import report
from mok_megatron.demo.settings import DemoSettings
from mok_megatron.errors import MoKBuildError, MoKUnsupportedError

EXIT_AGREES = 0
EXIT_DIFFERS = 1
EXIT_FAILED = 3
"""2 is the exit code of a wrong argument, as everywhere."""


def run_demo(settings: DemoSettings) -> int:
    """Trains, compares, writes the report into ``settings.out`` and prints it.

    Returns:
        0: MoK stayed within four times the floor. 1: it did not. 3: there is no answer, because the training failed or
        took longer than ``settings.timeout_seconds``, or because the report could not be written, which is printed then
        all the same. No process is left behind.

    Raises:
        MoKArgumentError: ``settings.out`` cannot be made or written; nothing was trained.
        MoKUnsupportedError: a package that the demo needs is not installed.
    """
    report.prepare(settings.out)
    _require_packages()
    try:
        return _run(settings)
    except Exception:
        # Left to the interpreter this would be exit code 1, "MoK differs".
        traceback.print_exc()
        return EXIT_FAILED


def _run(settings: DemoSettings) -> int:
    device, reason = choose_device(settings)
    if device == "cpu":
        # Megatron must not pick a GPU for tensors that the CPU executor then refuses.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    machine = {"executor": "CPU executor" if device == "cpu" else "GPU", "executor_reason": reason, **_machine()}
    print(f"MoK runs on the {machine['executor']}: {machine['executor_reason']}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="mok-demo-") as scratch:
        error = _train(settings, device, scratch)
        if error is not None:
            print(f"mok-megatron demo: training failed\n{error}", file=sys.stderr)
            return EXIT_FAILED
        runs = json.loads(Path(scratch, "runs.json").read_text())
    summary = report.summarise(settings.to_dict(), machine, runs)
    try:
        paths = report.write(summary, settings.out)
    finally:
        print(report.to_markdown(summary))  # also where it could not be written: the training took its time
    print("written: " + ", ".join(str(path) for path in paths))
    return EXIT_AGREES if summary["passed"] else EXIT_DIFFERS


def _train(settings: DemoSettings, device: str, scratch: str) -> str | None:
    """Runs one process a rank. Returns None when all succeeded, else what went wrong; no process is left either way."""
    from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, start_processes

    deadline = time.monotonic() + settings.timeout_seconds
    context = start_processes(
        _train_rank,
        args=(settings, device, scratch),
        nprocs=settings.ranks,
        join=False,
        daemon=True,  # an interrupt while they are being started ends them, too
        start_method="spawn",
    )
    try:
        while not context.join(timeout=0.5):  # raises, after ending the others, when a process fails
            if time.monotonic() > deadline:
                return f"not finished after --timeout-seconds {settings.timeout_seconds:g}; all processes were ended"
    except (ProcessRaisedException, ProcessExitedException) as error:
        return str(error).strip()
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()
    return None


def _train_rank(rank: int, settings: DemoSettings, device: str, scratch: str) -> None:
    _end_with_parent(scratch)
    from mok_megatron.demo.train import train_rank  # Megatron-Core is imported here, in the training process only

    train_rank(rank, settings, device, scratch)


def _end_with_parent(scratch: str) -> None:
    """From now on this process ends, whatever it is doing, once its parent is gone, however that ended.

    torch has the kernel send SIGINT then, which does nothing where SIGINT is ignored (a background job of a script,
    nohup) or where the main thread is inside a collective.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a process that the demo started may call this"

    def wait() -> None:
        parent.join()
        shutil.rmtree(scratch, ignore_errors=True)  # the parent had no time to
        os._exit(EXIT_FAILED)

    threading.Thread(target=wait, name="mok_megatron.demo.parent", daemon=True).start()


def _require_packages() -> None:
    needed = {"megatron.core": "megatron-core", "matplotlib": "matplotlib", "tqdm": "tqdm"}
    missing = [package for module, package in needed.items() if not _is_installed(module)]
    if missing:
        raise MoKUnsupportedError(
            f"the demo needs {' and '.join(missing)}, not installed here; install mok-megatron with its extra: pip install '.[demo]'"
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that would hold it is missing
        return False


def choose_device(settings: DemoSettings) -> tuple[str, str]:
    """``cuda``, one GPU a rank, where the kernels can run this demo, else ``cpu``; and the reason in words."""
    import torch

    from mok_megatron.build import build_info, check_device_architecture

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return "cpu", "no NVIDIA GPU found"
    unused = f"{count} GPU(s) found and left unused"
    if settings.dtype != "bf16":
        return "cpu", f"{unused}: --dtype {settings.dtype}, and the GPU kernels compute in bf16 only"
    if count < settings.ranks:
        return "cpu", f"{unused}: --ranks {settings.ranks} needs as many"
    try:
        for index in range(settings.ranks):
            check_device_architecture(build_info(), torch.cuda.get_device_capability(index))
    except MoKBuildError as error:
        return "cpu", f"{unused}: {error}"
    return "cuda", f"{settings.ranks} x {torch.cuda.get_device_name(0)}"


def _machine() -> dict[str, object]:
    import torch

    from mok_megatron import __version__

    return {
        "mok_megatron": __version__,
        "megatron-core": importlib.metadata.version("megatron-core"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
    }
