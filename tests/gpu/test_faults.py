"""What goes wrong on one rank is an error on every rank that says what it is, and no wait is unbounded."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mok_megatron import MoKError
from tests.distributed import RankPool, run_ranks_outcomes
from tests.gpu.ranks import DEVICE, EP_SIZES, EXPERTS, HIDDEN, INNER, TOKENS, TOPK, random_part, start, two_gpus

LIMIT = 2.0
HALVES = [TOKENS // 2] * 2


def _be_elsewhere() -> None:
    """Python that runs, far from any call of this package."""
    for _ in range(150):
        time.sleep(0.1)


def _one_rank_stays_away(rank: int, kind: str, blocked: bool) -> None:
    from mok_megatron.protocol import PassTag

    mok, config, workspace = start(rank, 2, timeout_seconds=LIMIT)
    part = random_part(HALVES, 1, rank)
    schedule = mok.build_schedule(workspace, config, part.routes)
    operands = (part.x, part.p, part.w13, part.w2)
    if kind == "backward":
        _, context = mok.forward(config, workspace, schedule, *operands, tag=PassTag(1, 1))
    torch.cuda.synchronize()
    if rank == 1:
        # Longer than the other rank takes to end.
        time.sleep(LIMIT + (8 if blocked else 3))
        raise SystemExit(3)
    if kind == "backward":
        mok.backward(config, workspace, schedule, context, part.dy, *operands, tag=PassTag(2, 5))
    else:
        mok.forward(config, workspace, schedule, *operands, tag=PassTag(2, 5))
    if blocked:
        time.sleep(60)
    _be_elsewhere()


@two_gpus
@pytest.mark.parametrize(("kind", "blocked"), [("forward", True), ("backward", False)])
def test_f_t1_a_rank_that_does_not_come(kind: str, blocked: bool) -> None:
    """In fresh processes, since one ends."""
    outcome = run_ranks_outcomes(_one_rank_stays_away, 2, kind, blocked, timeout=60)[0]
    assert outcome.seconds < LIMIT + 10 + 20  # start-up of CUDA and NCCL on top
    if blocked:
        # The main thread cannot take an exception: the watchdog prints it and ends the process.
        assert outcome.status == "died" and outcome.exit_code == 74, outcome.describe()
    else:
        assert outcome.status == "error" and outcome.error_types[0] == "MoKTimeoutError", outcome.describe()
    text = outcome.output if blocked else outcome.message
    # Clusters without work wait for the end of the pass at the same time: this rank is not through either, and must not be named.
    for part in ("rank 0", f"{kind} of layer 2, microbatch 5", "rank(s) 1 missing; phase 'entered'", "expected", f"limit {LIMIT:g} s"):
        assert part in text, text


def _error_of(workspace: Any, call: Callable[[], Any]) -> tuple[list[str], str]:
    """What a call raises, at once or from the watchdog's thread while this rank is elsewhere: class names and text. It ends the workspace."""
    try:
        call()
        _be_elsewhere()
    except MoKError as error:
        return [kind.__name__ for kind in type(error).__mro__], str(error)
    finally:
        torch.cuda.synchronize()
        workspace.close()
    raise AssertionError("nothing was raised")


def _one_rank_refuses(rank: int, kind: str) -> tuple[list[str], str]:
    """A gradient of outputs of the wrong width, or one expert's weight at an address that the kernels cannot read."""
    mok, config, workspace = start(rank, 2)
    part = random_part(HALVES, 1, rank)
    schedule = mok.build_schedule(workspace, config, part.routes)
    w13, w2 = list(part.w13), list(part.w2)
    if kind == "address":
        if rank == 1:
            flat = torch.empty(w2[3].numel() + 1, dtype=w2[3].dtype, device=DEVICE)
            w2[3] = flat[1:].view_as(w2[3]).copy_(w2[3])
        return _error_of(workspace, lambda: mok.forward(config, workspace, schedule, part.x, part.p, w13, w2))
    _, context = mok.forward(config, workspace, schedule, part.x, part.p, w13, w2)
    dy = part.dy[:, :128] if rank == 1 else part.dy
    return _error_of(workspace, lambda: mok.backward(config, workspace, schedule, context, dy, part.x, part.p, w13, w2))


@two_gpus
@pytest.mark.parametrize(("kind", "text"), [("shape", "dy: shape"), ("address", "w2[3]: address must be a multiple of 16")])
def test_a_refusal_reaches_the_other_rank(ranks2: RankPool, kind: str, text: str) -> None:
    found = ranks2.run(_one_rank_refuses, kind, timeout=60)
    for (kinds, message), error in zip(found, ("MoKPeerError", "MoKArgumentError"), strict=True):
        assert kinds[0] == error, (kinds, message)
        assert text in message


def _overflow(rank: int, ep_size: int) -> tuple[list[str], str]:
    """All routes go to rank 0's experts, whose share is a hundredth."""
    mok, config, workspace = start(rank, ep_size, schedule_capacity_multiplier=0.01)
    routes = torch.arange(TOPK, device=DEVICE).repeat(TOKENS, 1)
    x, p = torch.randn(TOKENS, HIDDEN, device=DEVICE).bfloat16(), torch.rand(TOKENS, TOPK, device=DEVICE)
    local = EXPERTS // ep_size
    w13 = torch.randn(local, 2 * INNER, HIDDEN, device=DEVICE).bfloat16()
    w2 = torch.randn(local, HIDDEN, INNER, device=DEVICE).bfloat16()

    def call() -> None:
        schedule = mok.build_schedule(workspace, config, routes)
        mok.forward(config, workspace, schedule, x, p, w13, w2)

    return _error_of(workspace, call)


@pytest.mark.parametrize("ep_size", EP_SIZES)
def test_overflow_raises_on_every_rank(ranks2: RankPool, ep_size: int) -> None:
    needed = TOPK * -(-TOKENS * ep_size // 128) * 128
    for kinds, message in ranks2.run(_overflow, ep_size, ranks=ep_size, timeout=60):
        assert kinds[0] == "MoKCapacityError", (kinds, message)
        assert f"rank 0 needs {needed} rows" in message


def _bad_id(rank: int) -> tuple[list[str], str]:
    """Rank 1 brings an id that would wrap into a good one in 32 bits."""
    mok, config, workspace = start(rank, 2, timeout_seconds=LIMIT)
    part = random_part(HALVES, 1, rank)
    routes = part.routes.long()
    if rank == 1:
        routes[37, 2] = 2**32 + 1

    def call() -> None:
        schedule = mok.build_schedule(workspace, config, routes)
        torch.cuda.synchronize()
        mok.forward(config, workspace, schedule, part.x, part.p, part.w13, part.w2)

    return _error_of(workspace, call)


@two_gpus
def test_a_t4_a_bad_id_ends_every_rank(ranks2: RankPool) -> None:
    """The rank that brought it says what it is; the other one is not left waiting."""
    (other, other_message), (culprit, message) = ranks2.run(_bad_id, timeout=60)
    assert culprit[0] == "MoKArgumentError", (culprit, message)
    assert f"topk_experts[37, 2]={2**32 + 1}" in message
    assert other[0] == "MoKPeerError", (other, other_message)
    assert "rank 1" in other_message
    assert f"topk_experts[37, 2]={2**32 + 1}" in other_message
