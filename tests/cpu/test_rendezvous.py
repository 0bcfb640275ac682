"""Making a workspace never waits longer than config.timeout_seconds, and says which process is missing."""

from __future__ import annotations

import glob
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from mok_megatron import MoKConfig, functional
from mok_megatron.errors import MoKArgumentError, MoKError, MoKTimeoutError
from mok_megatron.workspace import MoKWorkspace
from tests.distributed import RankPool, job_group, run_ranks_outcomes

LIMIT = 2.0


def _make(group: object, **changes: object) -> MoKWorkspace:
    sizes = {"num_local_tokens": 8, "hidden_size": 64, "topk": 2, "num_local_experts": 2, "intermediate_size": 64, "dtype": torch.float32}
    return functional.get_workspace(MoKConfig(timeout_seconds=LIMIT), group, **{"device": "cpu", **sizes, **changes})


def _one_stays_away(rank: int, absent: int) -> str:
    if rank == absent:
        time.sleep(LIMIT + 6)
        return "absent"
    started = time.monotonic()
    with pytest.raises(MoKTimeoutError) as caught:
        _make(job_group())
    assert time.monotonic() - started < LIMIT + 4
    assert caught.value.missing_ranks == (absent,)
    return str(caught.value)


@pytest.mark.parametrize("absent", [0, 2])
def test_f_t1_a_rank_that_does_not_come_to_the_making(absent: int) -> None:
    outcomes = run_ranks_outcomes(_one_stays_away, 3, absent, timeout=60)
    for rank in {0, 1, 2} - {absent}:
        assert outcomes[rank].status == "ok", outcomes[rank].describe()
        assert f"rank {rank} of 3" in outcomes[rank].value and f"rank(s) {absent} (global rank {absent}) missing" in outcomes[rank].value


def _one_stalls_inside(rank: int) -> str:
    from mok_megatron import symmetric_memory

    if rank == 1:
        create = symmetric_memory._shared_memory

        def stalled(*args: object, **kwargs: object) -> object:
            time.sleep(LIMIT + 6)
            return create(*args, **kwargs)

        symmetric_memory._shared_memory = stalled
    started = time.monotonic()
    with pytest.raises(MoKTimeoutError) as caught:
        _make(job_group())
    if rank == 0:
        assert time.monotonic() - started < LIMIT + 4
    return str(caught.value)


def test_f_t1_a_rank_that_stalls_inside_the_making() -> None:
    before = set(glob.glob("/dev/shm/mok_megatron_*"))
    outcome = run_ranks_outcomes(_one_stalls_inside, 2, timeout=60)[0]
    assert outcome.status == "ok", outcome.describe()
    assert "rank(s) 1 (global rank 1) missing; phase 'workspace', sharing memory" in outcome.value
    assert set(glob.glob("/dev/shm/mok_megatron_*")) <= before


def _killed_in_the_second_group(rank: int) -> str | None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank // 2]
    workspace = _make(group)
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        with pytest.raises(MoKTimeoutError) as caught:
            functional.build_schedule(workspace, MoKConfig(timeout_seconds=LIMIT), torch.tensor([[0, 1]] * 8))
        return str(caught.value)
    return None


def test_f_t1_messages_name_the_process_not_only_the_rank_in_the_group() -> None:
    text = run_ranks_outcomes(_killed_in_the_second_group, 4, timeout=60)[2].value
    assert "rank 0 of 2: rank(s) 1 missing" in text
    assert "rank 0 is global rank 2, process " in text and "rank 1 is global rank 3, process " in text


def _late(rank: int) -> str:
    """Rank 1 comes when rank 0 has given up."""
    workspace = _make(job_group())
    config, routes = MoKConfig(timeout_seconds=LIMIT), torch.tensor([[0, 1]] * 8)
    try:
        if rank == 1:
            for _ in range(int((LIMIT + 2) * 10)):
                time.sleep(0.1)
        functional.build_schedule(workspace, config, routes)
    except MoKError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def test_a_late_rank_is_told_that_its_peer_gave_up() -> None:
    texts = [outcome.value for outcome in run_ranks_outcomes(_late, 2, timeout=60)]
    assert texts[0].startswith("MoKTimeoutError") and "rank(s) 1 missing" in texts[0]
    assert texts[1].startswith("MoKPeerError") and "rank 0" in texts[1]


def _bad_device_on_one_rank(rank: int, device: str) -> str:
    with pytest.raises(MoKArgumentError) as caught:
        _make(job_group(), device=device if rank == 1 else "cpu")
    return str(caught.value)


@pytest.mark.parametrize("device", ["bogus", "meta"] + (["cuda"] if not torch.cuda.is_available() else []))
def test_a_bad_device_on_one_rank_is_an_error_on_all(device: str, ranks2: RankPool) -> None:
    for text in ranks2.run(_bad_device_on_one_rank, device):
        assert f"rank 1: device={device}" in text.replace("'", "")


def _no_config_on_one_rank(rank: int) -> str:
    workspace = _make(job_group())
    routes = torch.tensor([[0, 1]] * 8)
    with pytest.raises(MoKError) as caught:
        functional.build_schedule(workspace, None if rank == 1 else MoKConfig(timeout_seconds=LIMIT), routes)
    functional.build_schedule(workspace, MoKConfig(timeout_seconds=LIMIT), routes)
    return str(caught.value)


def test_no_config_on_one_rank_is_an_error_on_all(ranks2: RankPool) -> None:
    for text in ranks2.run(_no_config_on_one_rank):
        assert "config=None: must be a MoKConfig" in text


def test_a_failed_workspace_is_made_anew() -> None:
    first = _make(None)
    first.fail(MoKError("planted"))
    second = _make(None)
    assert second is not first and second.failure is None
    assert _make(None) is second


def test_what_does_not_fit_is_an_argument_error() -> None:
    with pytest.raises(MoKArgumentError, match=r"num_local_tokens: the buffers need \d+ bytes"):
        _make(None, num_local_tokens=2**29)
