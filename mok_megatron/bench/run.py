"""A whole run: the processes of the ranks, every shape and workload in turn, and the files that come out."""

from __future__ import annotations

import datetime
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mok_megatron.bench import chart, report
from mok_megatron.bench.layer import measure
from mok_megatron.bench.problem import Ranks, make_problem
from mok_megatron.bench.rows import COMPETITORS
from mok_megatron.bench.settings import BenchSettings
from mok_megatron.bench.timing import copy_rate, make_clock
from mok_megatron.errors import MoKArgumentError

# A rank that failed alone leaves its peers in a collective: they give up after this.
_COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=180)


def run(settings: BenchSettings) -> int:
    """Run on all ranks; under torchrun this process is one of them, else EP > 1 starts them. Returns the exit code.

    Raises:
        MoKArgumentError: the machine does not have what the settings ask for.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1 and world != settings.ep:
        raise MoKArgumentError(f"ep={settings.ep}: must be {world}, the number of processes that were launched")
    if settings.device == "cuda" and torch.cuda.device_count() < settings.ep:
        raise MoKArgumentError(
            f"ep={settings.ep}: must be at most {torch.cuda.device_count()}, the number of GPUs here; without "
            "one, --device cpu tries the benchmark on a small shape"
        )
    if settings.device == "cpu" and int(os.environ.get("RANK", "0")) == 0:
        print("on the CPU, with gloo in NCCL's place: these times say nothing about a GPU")
    try:
        settings.out.mkdir(parents=True, exist_ok=True)
        probe = settings.out / f"layer.{os.getpid()}.tmp"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise MoKArgumentError(f"out={str(settings.out)!r}: must be a folder that can be written: {error}") from error
    if world > 1:
        return _run_rank(settings, int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), None)
    if settings.ep == 1:
        return _run_rank(settings, 0, 0, None)
    with tempfile.TemporaryDirectory() as folder:
        spawned = torch.multiprocessing.spawn(_rank_process, args=(settings, f"{folder}/store"), nprocs=settings.ep, join=False)
        try:
            while not spawned.join():
                pass
        except torch.multiprocessing.ProcessRaisedException as error:
            print(f"{error}", file=sys.stderr)
            return 1
        except torch.multiprocessing.ProcessExitedException as error:
            if error.exit_code == 1:  # the ranks' own answer, printed by rank 0
                return 1
            raise
    return 0


def _rank_process(rank: int, settings: BenchSettings, store: str) -> None:
    code = _run_rank(settings, rank, rank, store)
    sys.stdout.flush()
    sys.stderr.flush()
    # Nothing is left to clean up, and the interpreter's own end now and then aborts in the teardown of gloo's threads.
    os._exit(code)


def _run_rank(settings: BenchSettings, rank: int, local_rank: int, store: str | None) -> int:
    device = torch.device(settings.device, local_rank) if settings.device == "cuda" else torch.device("cpu")
    if settings.device == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // settings.ep))
    if settings.ep == 1:
        return _run_all(settings, Ranks(0, 1, device))
    rendezvous: dict[str, Any] = {} if store is None else {"store": dist.FileStore(store, settings.ep)}
    if settings.device == "cuda":
        dist.init_process_group("nccl", rank=rank, world_size=settings.ep, timeout=_COLLECTIVE_TIMEOUT, **rendezvous)
        host_group = dist.new_group(backend="gloo", timeout=_COLLECTIVE_TIMEOUT)
    else:
        dist.init_process_group("gloo", rank=rank, world_size=settings.ep, timeout=_COLLECTIVE_TIMEOUT, **rendezvous)
        host_group = dist.group.WORLD
    try:
        return _run_all(settings, Ranks(rank, settings.ep, device, dist.group.WORLD, host_group))
    finally:
        dist.destroy_process_group()


def _run_all(settings: BenchSettings, ranks: Ranks) -> int:
    started, records = time.time(), []
    clock = make_clock(ranks)
    rows = [COMPETITORS[name] for name in settings.rows]
    rate = copy_rate(ranks, clock)
    path = settings.out / "layer.json"
    for shape in settings.model_shapes():
        for tokens in settings.token_counts():
            for workload in settings.workload:
                problem = make_problem(shape, ranks, workload, tokens=tokens, seed=settings.seed)
                options = {"iterations": settings.iterations, "warmup": settings.warmup, "phases": settings.phases}
                results = measure(problem, rows, clock, **options)
                described = {"workload": workload, "tokens": tokens, "seed": settings.seed}
                records.append(report.make_record(problem, results, **described, hides_us=clock.hides_us, copy_rate=rate))
                del problem, results
                if ranks.device.type == "cuda":
                    torch.cuda.empty_cache()
                if ranks.rank == 0:
                    print(report.table(records[-1]), end="\n\n", flush=True)
                    report.write_json(path, records, _about(settings, ranks, started))
    bad = report.failures(records)
    if ranks.rank == 0:
        _finish(settings.out, path, records, bad)
    return 1 if bad else 0


def _about(settings: BenchSettings, ranks: Ranks, started: float) -> dict[str, Any]:
    return {
        "benchmark": "layer",
        "seconds": round(time.time() - started, 1),
        "iterations": settings.iterations,
        "warmup": settings.warmup,
        "phases": list(settings.phases),
        "environment": report.environment(ranks.device),
    }


def _finish(out: Path, path: Path, records: list[dict[str, Any]], bad: list[str]) -> None:
    for line in report.skews(records):
        print(line)
    excuse = chart.write_chart(out / "layer.png", records)
    print(f"wrote {path}" + (f" and {out / 'layer.png'}" if excuse is None else f"; {excuse}"))
    for line in bad:
        print(line)
