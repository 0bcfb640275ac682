"""Run a function on several ranks of one host, for tests.

Two ways:

* :func:`run_ranks` (values, or one exception with every rank's traceback) and :func:`run_ranks_outcomes` (what happened on each
  rank) start fresh processes for one call;
* :class:`RankPool` keeps its processes between calls; a rank that hangs or dies costs a restart at the next call, nothing more.

``fn`` must be importable (a function at module level). It is called as ``fn(rank, *args)`` with torch.distributed (gloo) ready.
:func:`job_group` gives, on a rank, the process group of the ranks that take part in the present call.

Processes are forked from a server process that has imported torch once (``forkserver``), since importing it anew in every process
takes seconds. The server never runs a torch operation and has no threads, so that the fork is as clean as a spawn.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_PRELOAD = ["torch", "torch.distributed", "pytest"]
_GRACE_AFTER_FAILURE = 20.0  # seconds that the other ranks get to end once one has failed
_LOG_TAIL = 4000  # characters of a rank's output shown with a failure

_context = multiprocessing.get_context("forkserver")
_job_group: dist.ProcessGroup | None = None


def preload(*modules: str) -> None:
    """Add modules that rank processes find imported. Call it before the first rank starts (a conftest is the place)."""
    _PRELOAD.extend(name for name in modules if name not in _PRELOAD)


def job_group() -> dist.ProcessGroup:
    """Process group of the ranks of the present call (on a rank only)."""
    if _job_group is None:
        raise RuntimeError("job_group() is for functions that run on a rank")
    return _job_group


@dataclass
class RankOutcome:
    """What one rank did: ``status`` is "ok", "error" (fn raised), "died" (the process ended) or "timeout" (still running)."""

    rank: int
    status: str
    value: Any = None
    error_types: tuple[str, ...] = ()  # class names of the exception, most derived first
    message: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)  # picklable attributes of the exception
    traceback: str = ""
    exit_code: int | None = None  # None while the process lives
    seconds: float = 0.0
    output: str = ""  # tail of what the process wrote to stdout and stderr

    def describe(self) -> str:
        """One paragraph for a failure report."""
        head = f"rank {self.rank}: {self.status} after {self.seconds:.1f} s, exit code {self.exit_code}"
        parts = [head, self.traceback.rstrip(), self.output and f"-- output --\n{self.output.rstrip()}"]
        return "\n".join(part for part in parts if part)


class RankError(AssertionError):
    """At least one rank did not return; the text has every rank's traceback. ``outcomes`` has one entry a rank."""

    def __init__(self, outcomes: Sequence[RankOutcome]) -> None:
        self.outcomes = list(outcomes)
        running = [o.rank for o in outcomes if o.status == "timeout"]
        bad = [o.rank for o in outcomes if o.status != "ok"]
        head = f"ranks {bad} of {len(outcomes)} failed"
        if running:
            head += f"; ranks {running} were still running and were killed"
        super().__init__("\n\n".join([head, *(o.describe() for o in outcomes if o.status != "ok")]))


def _exception_fields(exc: BaseException) -> dict[str, Any]:
    attributes = {}
    for name, value in vars(exc).items():
        with contextlib.suppress(Exception):
            pickle.dumps(value)
            attributes[name] = value
    return {
        "status": "error",
        "error_types": tuple(cls.__name__ for cls in type(exc).__mro__),
        "message": str(exc),
        "attributes": attributes,
        "traceback": "".join(traceback.format_exception(exc)),
    }


def _worker(conn: Connection, rank: int, world_size: int, folder: str, env: dict[str, str], one_shot: bool) -> None:
    global _job_group
    with contextlib.suppress(OSError):  # end with the server process, even when it was killed
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    log = os.open(f"{folder}/rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2)
    stacks = open(f"{folder}/rank{rank}.stacks", "w")  # noqa: SIM115 - open as long as the process
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    os.environ.update(env)
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=datetime.timedelta(seconds=60))
    groups = {n: dist.new_group(list(range(n))) for n in range(1, world_size)}
    groups[world_size] = dist.group.WORLD
    conn.send_bytes(b"ready")
    code = 0
    while True:
        try:
            job = conn.recv_bytes()
        except (EOFError, OSError):
            break
        if not job:
            break
        start = time.monotonic()
        try:
            fn, args, ranks = pickle.loads(job)
            _job_group = groups[ranks]
            reply = {"status": "ok", "value": fn(rank, *args)}
            data = pickle.dumps(reply)
        except BaseException as exc:  # whatever it is, the parent must hear of it
            reply = _exception_fields(exc)
            data = pickle.dumps(reply)
            code = 1 if not isinstance(exc, SystemExit) else (exc.code if isinstance(exc.code, int) else 1)
        conn.send_bytes(data + pickle.dumps(time.monotonic() - start))
        if one_shot:
            break
    # Not a normal exit of a one-shot rank with an error: a peer may be gone, and gloo's destructors wait for it.
    sys.stdout.flush()
    sys.stderr.flush()
    if code == 0 and one_shot:
        dist.destroy_process_group()
        sys.exit(0)
    for child in multiprocessing.active_children():
        child.terminate()  # Megatron's checkpoint writer leaves one, and nobody else would end it
    os._exit(code)


def _start_server() -> None:
    """Start the fork server with one OpenMP thread; a library reads that variable when it is loaded, which is there."""
    from multiprocessing import forkserver

    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        _context.set_forkserver_preload(_PRELOAD)
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


class RankPool:
    """``world_size`` processes with torch.distributed ready, kept between calls.

    Args:
        world_size: number of ranks.
        env: environment variables set on every rank before the process group is made.
        one_shot: the processes end after their first call (so that exit codes can be seen).
    """

    def __init__(self, world_size: int, env: dict[str, str] | None = None, *, one_shot: bool = False) -> None:
        self.world_size = world_size
        self._env = dict(env or {})
        self._one_shot = one_shot
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._folder = ""

    def _start(self) -> None:
        _start_server()
        self._folder = tempfile.mkdtemp(prefix="ranks-")
        for rank in range(self.world_size):
            mine, theirs = _context.Pipe()
            args = (theirs, rank, self.world_size, self._folder, self._env, self._one_shot)
            process = _context.Process(target=_worker, args=args, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(mine)
        for rank, conn in enumerate(self._connections):
            try:
                ready = conn.poll(90) and conn.recv_bytes() == b"ready"
            except (EOFError, OSError):
                ready = False
            if not ready:
                output = self._output(rank)
                self.close()
                raise RuntimeError(f"rank {rank} did not start\n{output}")

    def _output(self, rank: int) -> str:
        path = Path(self._folder, f"rank{rank}.log")
        return path.read_text(errors="replace")[-_LOG_TAIL:] if path.exists() else ""

    def _stacks(self, rank: int) -> str:
        """Python stacks of a rank that does not answer (faulthandler writes them, also when the GIL is held)."""
        with contextlib.suppress(OSError, TypeError):
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.3)
        path = Path(self._folder, f"rank{rank}.stacks")
        return path.read_text(errors="replace")[-_LOG_TAIL:] if path.exists() else ""

    def outcomes(self, fn: Callable[..., Any], *args: Any, ranks: int | None = None, timeout: float = 60.0) -> list[RankOutcome]:
        """Run ``fn(rank, *args)`` on the first ``ranks`` ranks (all by default) and say what each did; never raises for them."""
        count = self.world_size if ranks is None else ranks
        if not 1 <= count <= self.world_size:
            raise ValueError(f"ranks={count} of a pool of {self.world_size}")
        if not self._processes or any(not p.is_alive() for p in self._processes):
            self.close()
            self._start()
        job = pickle.dumps((fn, args, count))
        start = time.monotonic()
        for conn in self._connections[:count]:
            with contextlib.suppress(OSError):
                conn.send_bytes(job)
        results: dict[int, RankOutcome] = {}
        deadline = start + timeout
        while len(results) < count and time.monotonic() < deadline:
            pending = {self._connections[r]: r for r in range(count) if r not in results}
            for conn in wait(list(pending), timeout=deadline - time.monotonic()):
                rank = pending[conn]  # type: ignore[index]
                results[rank] = outcome = self._receive(rank, time.monotonic() - start)
                if outcome.status != "ok":
                    deadline = min(deadline, time.monotonic() + _GRACE_AFTER_FAILURE)
        for rank in range(count):
            if rank not in results:
                text = "stacks of the running process:\n" + self._stacks(rank)
                seconds = time.monotonic() - start
                results[rank] = RankOutcome(rank, "timeout", traceback=text, seconds=seconds)
        for rank, outcome in results.items():
            if outcome.status != "ok":
                outcome.output = self._output(rank)
        if self._one_shot:
            for rank, outcome in results.items():
                if outcome.status != "timeout":
                    self._processes[rank].join(20)
                    outcome.exit_code = self._processes[rank].exitcode
        if self._one_shot or any(o.status in ("died", "timeout") for o in results.values()):
            self.close()
        return [results[rank] for rank in range(count)]

    def _receive(self, rank: int, seconds: float) -> RankOutcome:
        try:
            data = self._connections[rank].recv_bytes()
        except (EOFError, OSError):
            self._processes[rank].join(20)
            return RankOutcome(rank, "died", exit_code=self._processes[rank].exitcode, seconds=seconds)
        import io

        stream = io.BytesIO(data)
        outcome = RankOutcome(rank, **pickle.load(stream))
        outcome.seconds = pickle.load(stream)
        return outcome

    def run(self, fn: Callable[..., Any], *args: Any, ranks: int | None = None, timeout: float = 60.0) -> list[Any]:
        """Run ``fn(rank, *args)`` on the first ``ranks`` ranks and return their values; :class:`RankError` if one failed."""
        outcomes = self.outcomes(fn, *args, ranks=ranks, timeout=timeout)
        if any(o.status != "ok" for o in outcomes):
            self.close()  # ranks may have stopped in the middle of a collective
            raise RankError(outcomes)
        return [o.value for o in outcomes]

    def close(self) -> None:
        """End all ranks: those that wait for work are asked, the others killed. The next call starts new ones."""
        for conn in self._connections:
            with contextlib.suppress(OSError):
                conn.send_bytes(b"")
        deadline = time.monotonic() + 2.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(10)
        for conn in self._connections:
            conn.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._connections, self._folder = [], [], ""


def run_ranks_outcomes(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0, env: dict[str, str] | None = None
) -> list[RankOutcome]:
    """Run ``fn(rank, *args)`` in ``world_size`` fresh processes and say what each did, exit codes included."""
    pool = RankPool(world_size, env, one_shot=True)
    try:
        return pool.outcomes(fn, *args, timeout=timeout)
    finally:
        pool.close()


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0, env: dict[str, str] | None = None) -> list[Any]:
    """Run ``fn(rank, *args)`` in ``world_size`` fresh processes and return their values; :class:`RankError` if one failed."""
    outcomes = run_ranks_outcomes(fn, world_size, *args, timeout=timeout, env=env)
    if any(o.status != "ok" for o in outcomes):
        raise RankError(outcomes)
    return [o.value for o in outcomes]
