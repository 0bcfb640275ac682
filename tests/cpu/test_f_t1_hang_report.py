"""F-T1: a rank that does not come. The others stop within the limit, and their exceptions say who is missing, where, and how long."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest
import torch

from mok_megatron import MoKConfig, functional
from mok_megatron.errors import MoKTimeoutError
from mok_megatron.protocol import ROW_WORDS, CallKind, CallState, Flag, FlagMemory, FlagWait, GroupProtocol, PassTag, poll
from tests.cpu.problems import Batch, local_part, random_batch
from tests.distributed import RankOutcome, job_group, run_ranks_outcomes

LIMIT = 3.0
ABSENT = 2
HELD_UP = 1
TOKENS = (6, 6, 6, 6)


def _train(rank: int, batch: Batch, behaviour: str) -> None:
    """Two layers, two microbatches, forward only; rank ABSENT leaves before the forward of layer 1, microbatch 1."""
    config = MoKConfig(timeout_seconds=LIMIT)
    workspace = functional.get_workspace(
        config,
        job_group(),
        device="cpu",
        num_local_tokens=8,
        hidden_size=64,
        topk=2,
        num_local_experts=batch.experts // len(TOKENS),
        intermediate_size=64,
        dtype=torch.float32,
    )
    part = local_part(batch, TOKENS, rank)
    for microbatch in range(2):
        for layer in range(2):
            tag = PassTag(layer=layer, microbatch=microbatch)
            schedule = functional.build_schedule(workspace, config, part.topk_experts, tag=tag)
            if (rank, layer, microbatch) == (ABSENT, 1, 1):
                _stay_away(behaviour)
            functional.forward(config, workspace, schedule, part.x, part.router_weights, part.w13, part.w2, tag=tag)


def _stay_away(behaviour: str) -> None:
    if behaviour == "exits":
        os._exit(3)
    if behaviour == "raises":
        raise RuntimeError("something of the user's own")
    end = time.monotonic() + 120
    while time.monotonic() < end:
        time.sleep(0.05 if behaviour == "loops" else 120)


def _check_absent_rank(absent: RankOutcome, behaviour: str) -> None:
    """Blocked outside of this package, in Python or in one long C call, it still ends with the reason."""
    assert absent.seconds < LIMIT + 20, absent.describe()
    if behaviour == "loops":
        assert absent.status == "error" and "MoKPeerError" in absent.error_types, absent.describe()
        assert "lost" in absent.message and "missing" in absent.message, absent.message
    elif behaviour == "sleeps":
        assert "mok_megatron" in absent.output and "missing" in absent.output, absent.describe()


def _run(seed: int, behaviour: str) -> tuple[list[RankOutcome], float]:
    start = time.monotonic()
    outcomes = run_ranks_outcomes(_train, 4, random_batch(seed, 24, experts=8), behaviour, timeout=45)
    return outcomes, time.monotonic() - start


@pytest.mark.parametrize("behaviour", ["loops", "sleeps", "exits", "raises"])
def test_f_t1_one_rank_absent(seed: int, behaviour: str) -> None:
    outcomes, seconds = _run(seed, behaviour)
    text = "\n".join(o.describe() for o in outcomes)
    assert all(o.exit_code not in (0, None) for o in outcomes), text
    assert seconds < 45, text
    _check_absent_rank(outcomes[ABSENT], behaviour)
    for outcome in outcomes:
        if outcome.rank == ABSENT:
            continue
        assert outcome.status == "error" and outcome.error_types[0] == "MoKTimeoutError", text
        assert outcome.seconds < LIMIT + 10, text
        fields: dict[str, Any] = outcome.attributes
        assert fields["rank"] == outcome.rank
        assert tuple(fields["missing_ranks"]) == (ABSENT,)
        assert (fields["layer"], fields["microbatch"]) == (1, 1)
        assert fields["limit_seconds"] == LIMIT
        assert 0 < fields["waited_seconds"] < LIMIT + 10
        arrived = fields["arrived"]
        assert arrived[ABSENT] < fields["expected"], text
        message = outcome.message
        for piece in (f"rank {outcome.rank}", str(ABSENT), "layer 1", "microbatch 1", fields["phase"], f"limit {LIMIT:g} s"):
            assert piece in message, (piece, message)
        for piece in ("forward", f"call {fields['expected']}", "waited", "arrived"):
            assert piece in message, (piece, message)


def _absent_in(rank: int, batch: Batch, phase: str, seconds_late: float = 0.0) -> None:
    """One layer's step of which rank ABSENT leaves out one call, to which rank HELD_UP comes late."""
    config = MoKConfig(timeout_seconds=LIMIT)
    workspace = functional.get_workspace(
        config,
        job_group(),
        device="cpu",
        num_local_tokens=8,
        hidden_size=64,
        topk=2,
        num_local_experts=2,
        intermediate_size=64,
        dtype=torch.float32,
    )
    part = local_part(batch, TOKENS, rank)
    tag = PassTag(layer=7, microbatch=5)
    operands = (part.x, part.router_weights, part.w13, part.w2)

    def here(name: str) -> bool:
        if rank == ABSENT and name == phase:
            _stay_away("exits")
        if rank == HELD_UP and name == phase:
            time.sleep(seconds_late)
        return True

    if here("schedule"):
        schedule = functional.build_schedule(workspace, config, part.topk_experts, tag=tag)
    if here("forward"):
        functional.forward(config, workspace, schedule, *operands, tag=tag)
    if here("recompute"):
        context = functional.recompute_forward_context(config, workspace, schedule, *operands[:3], tag=tag)
    if here("backward"):
        functional.backward(config, workspace, schedule, context, part.dy, *operands, tag=tag)


def _check_that_absent_rank_is_named(outcomes: list[RankOutcome], phase: str) -> None:
    for outcome in outcomes:
        if outcome.rank == ABSENT:
            continue
        assert outcome.error_types[:1] == ("MoKTimeoutError",), outcome.describe()
        assert outcome.attributes["missing_ranks"] == (ABSENT,), outcome.describe()
        for piece in (phase, "layer 7", "microbatch 5"):
            assert piece in outcome.message, outcome.message


@pytest.mark.parametrize("phase", ["schedule", "forward", "recompute", "backward"])
def test_f_t1_every_kind_of_call_names_the_absent_rank(seed: int, phase: str) -> None:
    outcomes = run_ranks_outcomes(_absent_in, 4, random_batch(seed, 24, experts=8), phase, timeout=45)
    _check_that_absent_rank_is_named(outcomes, phase)


@pytest.mark.parametrize("seconds_late", [0.0, LIMIT / 3])
@pytest.mark.parametrize("phase", ["forward", "recompute", "backward"])
def test_f_t1_a_rank_that_the_absent_one_holds_up_is_not_blamed(seed: int, phase: str, seconds_late: float) -> None:
    """All routes lead to rank HELD_UP, which waits for the absent rank's rows; the others wait for both, and sooner if it comes late."""
    experts = torch.tensor([2 * HELD_UP, 2 * HELD_UP + 1], dtype=torch.int32)
    batch = random_batch(seed, 24, experts=8, routes=experts.repeat(24, 1))
    outcomes = run_ranks_outcomes(_absent_in, 4, batch, phase, seconds_late, timeout=45)
    _check_that_absent_rank_is_named(outcomes, phase)


def test_who_is_blamed_for_a_pass_that_does_not_end(seed: int) -> None:
    """Whoever did not enter; where all did, whoever is not done."""
    rng = random.Random(seed)
    for _ in range(100):
        ranks, call = rng.randint(2, 8), rng.randint(1, 1000)
        flags = [FlagMemory(torch.zeros(ranks, ROW_WORDS, dtype=torch.int64), torch.zeros(0)) for _ in range(ranks)]
        protocols = [GroupProtocol(rank, flags, torch.tensor([call - 1])) for rank in range(ranks)]
        some_absent = rng.random() < 0.5
        reached = {rank: rng.choice([Flag.ENTERED, Flag.DONE, None] if some_absent else [Flag.ENTERED, Flag.DONE]) for rank in range(ranks)}
        waiter = rng.randrange(ranks)
        reached[waiter] = Flag.DONE
        for rank, flag in reached.items():
            protocols[rank].signal_entered(call - 1 if flag is None else call, CallKind.BACKWARD, PassTag())
            protocols[rank].signal_done(call if flag is Flag.DONE else call - 1)
        wait = FlagWait(CallState(protocols[waiter], call, CallKind.BACKWARD, PassTag(), 0.0), Flag.DONE, range(ranks))
        absent = tuple(rank for rank in range(ranks) if reached[rank] is None)
        unfinished = tuple(rank for rank in range(ranks) if reached[rank] is Flag.ENTERED)
        if absent or unfinished:
            with pytest.raises(MoKTimeoutError) as caught:
                poll(wait, 0.0)
            assert caught.value.missing_ranks == (absent or unfinished)
        else:
            poll(wait, 0.0)


def _late(rank: int, batch: Batch) -> tuple[torch.Tensor, float]:
    """One rank comes late, but within the limit."""
    config = MoKConfig(timeout_seconds=20.0)
    workspace = functional.get_workspace(
        config,
        job_group(),
        device="cpu",
        num_local_tokens=8,
        hidden_size=64,
        topk=2,
        num_local_experts=2,
        intermediate_size=64,
        dtype=torch.float32,
    )
    part = local_part(batch, TOKENS, rank)
    schedule = functional.build_schedule(workspace, config, part.topk_experts)
    if rank == ABSENT:
        time.sleep(2.0)
    start = time.monotonic()
    y, _ = functional.forward(config, workspace, schedule, part.x, part.router_weights, part.w13, part.w2)
    return y, time.monotonic() - start


def test_a_late_rank_is_waited_for(seed: int) -> None:
    outcomes = run_ranks_outcomes(_late, 4, random_batch(seed, 24, experts=8), timeout=45)
    assert all(o.status == "ok" for o in outcomes), "\n".join(o.describe() for o in outcomes)
    assert all(o.value[1] > 1.0 for o in outcomes if o.rank != ABSENT)


def _different_programs(rank: int, batch: Batch) -> None:
    """Rank 1 runs the backward of a layer while the others run another layer's forward."""
    config = MoKConfig(timeout_seconds=LIMIT)
    workspace = functional.get_workspace(
        config,
        job_group(),
        device="cpu",
        num_local_tokens=8,
        hidden_size=64,
        topk=2,
        num_local_experts=2,
        intermediate_size=64,
        dtype=torch.float32,
    )
    part = local_part(batch, TOKENS, rank)
    schedule = functional.build_schedule(workspace, config, part.topk_experts)
    operands = (part.x, part.router_weights, part.w13, part.w2)
    _, context = functional.forward(config, workspace, schedule, *operands, tag=PassTag(layer=3))
    if rank == 1:
        functional.backward(config, workspace, schedule, context, part.dy, *operands, tag=PassTag(layer=3))
    else:
        functional.forward(config, workspace, schedule, *operands, tag=PassTag(layer=4))


def test_ranks_that_run_different_passes_are_told_so(seed: int) -> None:
    outcomes = run_ranks_outcomes(_different_programs, 4, random_batch(seed, 24, experts=8, missing=0.0), timeout=45)
    text = "\n".join(o.describe() for o in outcomes)
    assert all(o.status == "error" and "MoKError" in o.error_types for o in outcomes), text
    assert all(o.seconds < LIMIT + 10 for o in outcomes), text
    assert any("forward of layer 4" in o.message and "backward of layer 3" in o.message for o in outcomes), text
