"""What goes wrong on one rank is an error on every rank that says what it is, and no wait is unbounded. Processes end here: all are fresh."""

import time

import pytest
import torch

from tests.distributed import run_ranks_outcomes
from tests.gpu.ranks import DEVICE, EP_SIZES, EXPERTS, HIDDEN, INNER, TOKENS, TOPK, random_part, start, two_gpus

LIMIT = 2.0
HALVES = [TOKENS // 2] * 2


def _be_elsewhere() -> None:
    """Python that runs, far from any call of this package."""
    for _ in range(300):
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
        time.sleep(12 if blocked else 6)
        raise SystemExit(3)
    if kind == "backward":
        mok.backward(config, workspace, schedule, context, part.dy, *operands, tag=PassTag(2, 5))
    else:
        mok.forward(config, workspace, schedule, *operands, tag=PassTag(2, 5))
    if blocked:
        time.sleep(60)
    _be_elsewhere()


@two_gpus
@pytest.mark.parametrize(("kind", "blocked"), [("forward", False), ("forward", True), ("backward", False)])
def test_f_t1_a_rank_that_does_not_come(kind: str, blocked: bool) -> None:
    outcome = run_ranks_outcomes(_one_rank_stays_away, 2, kind, blocked, timeout=60)[0]
    assert outcome.seconds < LIMIT + 10 + 20  # start-up of CUDA and NCCL on top
    if blocked:
        # The main thread cannot take an exception: the watchdog prints it and ends the process.
        assert outcome.status == "died" and outcome.exit_code == 74, outcome.describe()
    else:
        assert outcome.status == "error" and outcome.error_types[0] == "MoKTimeoutError", outcome.describe()
    text = outcome.output if blocked else outcome.message
    for part in ("rank 0", f"{kind} of layer 2, microbatch 5", "rank(s) 1 missing", "expected", f"limit {LIMIT:g} s"):
        assert part in text, text


def _one_rank_refuses(rank: int, kind: str) -> None:
    """A gradient of outputs of the wrong width, or one expert's weight at an address that the kernels cannot read."""
    mok, config, workspace = start(rank, 2)
    part = random_part(HALVES, 1, rank)
    schedule = mok.build_schedule(workspace, config, part.routes)
    w13, w2 = list(part.w13), list(part.w2)
    if kind == "address" and rank == 1:
        flat = torch.empty(w2[3].numel() + 1, dtype=w2[3].dtype, device=DEVICE)
        w2[3] = flat[1:].view_as(w2[3]).copy_(w2[3])
    _, context = mok.forward(config, workspace, schedule, part.x, part.p, w13, w2)
    dy = part.dy[:, :128] if rank == 1 else part.dy
    mok.backward(config, workspace, schedule, context, dy, part.x, part.p, w13, w2)
    _be_elsewhere()


@two_gpus
@pytest.mark.parametrize(("kind", "text"), [("shape", "dy: shape"), ("address", "w2[3]: address must be a multiple of 16")])
def test_a_refusal_reaches_the_other_rank(kind: str, text: str) -> None:
    outcomes = run_ranks_outcomes(_one_rank_refuses, 2, kind, timeout=60)
    for outcome, error in zip(outcomes, ("MoKPeerError", "MoKArgumentError"), strict=True):
        assert outcome.error_types[:1] == (error,), outcome.describe()
        assert text in outcome.message, outcome.describe()


def _overflow(rank: int, ep_size: int) -> None:
    """All routes go to rank 0's experts, whose share is a hundredth."""
    mok, config, workspace = start(rank, ep_size, schedule_capacity_multiplier=0.01)
    routes = torch.arange(TOPK, device=DEVICE).repeat(TOKENS, 1)
    schedule = mok.build_schedule(workspace, config, routes)
    x, p = torch.randn(TOKENS, HIDDEN, device=DEVICE).bfloat16(), torch.rand(TOKENS, TOPK, device=DEVICE)
    local = EXPERTS // ep_size
    w13 = torch.randn(local, 2 * INNER, HIDDEN, device=DEVICE).bfloat16()
    w2 = torch.randn(local, HIDDEN, INNER, device=DEVICE).bfloat16()
    mok.forward(config, workspace, schedule, x, p, w13, w2)
    _be_elsewhere()


@pytest.mark.parametrize("ep_size", EP_SIZES)
def test_overflow_raises_on_every_rank(ep_size: int) -> None:
    needed = TOPK * -(-TOKENS * ep_size // 128) * 128
    for outcome in run_ranks_outcomes(_overflow, ep_size, ep_size, timeout=60):
        assert outcome.error_types[:1] == ("MoKCapacityError",), outcome.describe()
        assert f"rank 0 needs {needed} rows" in outcome.message, outcome.describe()


def _bad_id(rank: int) -> None:
    """Rank 1 brings an id that would wrap into a good one in 32 bits."""
    mok, config, workspace = start(rank, 2, timeout_seconds=LIMIT)
    part = random_part(HALVES, 1, rank)
    routes = part.routes.long()
    if rank == 1:
        routes[37, 2] = 2**32 + 1
    schedule = mok.build_schedule(workspace, config, routes)
    torch.cuda.synchronize()
    mok.forward(config, workspace, schedule, part.x, part.p, part.w13, part.w2)
    _be_elsewhere()


@two_gpus
def test_a_t4_a_bad_id_ends_every_rank() -> None:
    """The rank that brought it says what it is; the other one is not left waiting."""
    other, culprit = run_ranks_outcomes(_bad_id, 2, timeout=60)
    assert culprit.error_types[:1] == ("MoKArgumentError",), culprit.describe()
    assert f"topk_experts[37, 2]={2**32 + 1}" in culprit.message, culprit.describe()
    assert "MoKError" in other.error_types, other.describe()
    assert "rank 1" in other.message or "rank(s) 1 missing" in other.message, other.describe()
