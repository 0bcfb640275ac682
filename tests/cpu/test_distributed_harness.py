"""The harness itself: values, errors, deaths and hangs of ranks are reported and do not wedge a pool."""

from __future__ import annotations

import multiprocessing
import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed import RankError, RankPool, job_group, run_ranks, run_ranks_outcomes


def _sum(rank: int, value: int) -> torch.Tensor:
    total = torch.full((2,), rank + value, dtype=torch.bfloat16)
    dist.all_reduce(total, group=job_group())
    return total


def _fail_on_one(rank: int) -> int:
    if rank == 1:
        error = ValueError("rank one is unwell")
        error.needed = 7  # type: ignore[attr-defined]
        raise error
    return rank


def _hang_on_one(rank: int) -> None:
    while rank == 1:
        time.sleep(0.05)


def _die_on_one(rank: int) -> None:
    if rank == 1:
        os._exit(9)


def _pid(rank: int) -> int:
    return os.getpid()


def _leave_a_child(rank: int) -> int:
    multiprocessing.current_process()._config["daemon"] = False
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,), daemon=False)
    child.start()
    return child.pid


def _is_gone(pid: int) -> bool:
    """Ended; who inherits an ended process may be slow to collect it."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_values_come_back_in_rank_order() -> None:
    results = run_ranks(_sum, 2, 10)
    assert [r.tolist() for r in results] == [[21.0, 21.0]] * 2 and results[0].dtype == torch.bfloat16


def test_error_of_one_rank_is_raised_with_its_traceback_and_exit_code() -> None:
    outcomes = run_ranks_outcomes(_fail_on_one, 2)
    assert [o.status for o in outcomes] == ["ok", "error"]
    assert [o.exit_code for o in outcomes] == [0, 1]
    assert outcomes[1].error_types[0] == "ValueError" and outcomes[1].attributes == {"needed": 7}
    with pytest.raises(RankError, match="rank one is unwell"):
        run_ranks(_fail_on_one, 2)


def test_pool_is_kept_and_serves_fewer_ranks(ranks4: RankPool) -> None:
    first = ranks4.run(_pid)
    assert ranks4.run(_pid) == first and len(set(first)) == 4
    assert [r.tolist() for r in ranks4.run(_sum, 0, ranks=3)] == [[3.0, 3.0]] * 3


def test_pool_survives_a_hang_and_a_death() -> None:
    pool = RankPool(2)
    try:
        start = time.monotonic()
        with pytest.raises(RankError, match=r"ranks \[1\] were still running(.|\n)*_hang_on_one"):
            pool.run(_hang_on_one, timeout=1.0)
        assert time.monotonic() - start < 15
        assert [o.status for o in pool.outcomes(_die_on_one)] == ["ok", "died"]
        assert pool.run(_sum, 0)[1].tolist() == [1.0, 1.0]
        outcomes = pool.outcomes(_fail_on_one)
        assert [o.status for o in outcomes] == ["ok", "error"]
        assert pool.run(_sum, 0)[1].tolist() == [1.0, 1.0]
    finally:
        pool.close()


def test_processes_that_ranks_started_end_with_the_pool() -> None:
    pool = RankPool(2)
    try:
        children = pool.run(_leave_a_child)
        assert not any(map(_is_gone, children))
    finally:
        pool.close()
    deadline = time.monotonic() + 10
    while not all(map(_is_gone, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(map(_is_gone, children))
