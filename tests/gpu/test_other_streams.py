"""Kernels of other streams beside a pass: some hold SMs for long, some are collectives that wait for a peer which waits for the pass."""

import itertools
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed import RankPool
from tests.gpu.ranks import TOKENS, random_part, start, two_gpus


def _training_step(rank: int, ep_size: int, seed: int, **knobs):
    """A forward, a recompute and a backward; what comes of them."""
    mok, config, workspace = start(rank, ep_size, **knobs)
    part = random_part([TOKENS // ep_size] * ep_size, seed, rank)
    weights = (part.w13, part.w2)

    def step(between=lambda: None) -> list[torch.Tensor]:
        schedule = mok.build_schedule(workspace, config, part.routes)
        y, _ = mok.forward(config, workspace, schedule, part.x, part.p, *weights, save_context=False)
        between()
        context = mok.recompute_forward_context(config, workspace, schedule, part.x, part.p, part.w13)
        return [y, *mok.backward(config, workspace, schedule, context, part.dy, part.x, part.p, *weights)]

    return step


def _assert_equal(results: list[torch.Tensor], first: list[torch.Tensor]) -> None:
    for one, other in zip(results, first, strict=True):
        assert torch.equal(one, other)


def _hold_sms(spinners: int, cycles: float) -> list[torch.cuda.Stream]:
    """A kernel on each of so many streams, none of which ends soon."""
    streams = [torch.cuda.Stream() for _ in range(spinners)]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(cycles))
    time.sleep(0.05)
    return streams


def _beside_spinning_kernels(rank: int, spinners: int, sm_reserve: int, seed: int) -> None:
    """Kernels that hold SMs when the passes start, and end only long after them."""
    step = _training_step(rank, 1, seed, sm_reserve=sm_reserve)
    first = step()
    torch.cuda.synchronize()
    streams = _hold_sms(spinners, 2.4e9)
    done = torch.cuda.Event()
    results = step()
    done.record()
    begin = time.monotonic()
    while not done.query() and time.monotonic() - begin < 0.8:
        time.sleep(0.001)
    assert done.query(), "the passes wait for the kernels that hold SMs"
    assert not streams[0].query(), "the kernels beside them ended too early to prove anything"
    torch.cuda.synchronize()
    _assert_equal(results, first)


@pytest.mark.parametrize(("spinners", "sm_reserve"), [(1, 2), (24, 48)])
def test_kernels_that_hold_sms_do_not_hold_a_pass(ranks2: RankPool, spinners: int, sm_reserve: int, seed: int) -> None:
    ranks2.run(_beside_spinning_kernels, spinners, sm_reserve, seed, ranks=1, timeout=60)


def _held_on_one_rank(rank: int, ep_size: int, seed: int) -> None:
    """Without a reserve a pass ends with what holds its SMs: on one rank after the other, on one SM and on many."""
    step = _training_step(rank, ep_size, seed)
    first = step()
    for repeat, spinners in enumerate((1, 24, 1, 24)):
        torch.cuda.synchronize()
        if repeat // 2 % ep_size == rank:
            _hold_sms(spinners, 2e8)
        _assert_equal(step(), first)


def test_a_pass_whose_sms_are_held_comes_to_its_end(ranks2: RankPool, seed: int) -> None:
    ranks2.run(_held_on_one_rank, 1, seed, ranks=1, timeout=60)


@two_gpus
def test_two_ranks_of_which_one_is_held_come_to_their_end(ranks2: RankPool, seed: int) -> None:
    ranks2.run(_held_on_one_rank, 2, seed, timeout=60)


# Where each rank has its collective: before the forward, between it and the backward, after that.
PLACES = [*itertools.permutations(("before", "between", "after"), 2)]


def _collectives_in_opposite_order(rank: int, seed: int) -> None:
    step = _training_step(rank, 2, seed, sm_reserve=32)
    collectives = dist.new_group([0, 1], backend="nccl")
    data = torch.ones(1 << 24, device="cuda")
    dist.all_reduce(data, group=collectives)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()

    def reduce() -> None:
        with torch.cuda.stream(side):
            dist.all_reduce(data, group=collectives)

    first = step()
    for places in PLACES:
        place = places[rank]
        if place == "before":
            reduce()
        results = step(between=reduce if place == "between" else lambda: None)
        if place == "after":
            reduce()
        _assert_equal(results, first)
    torch.cuda.synchronize()
    assert float(data[0]) == 2.0 ** (1 + len(PLACES))


@two_gpus
def test_collectives_in_opposite_order_do_not_deadlock(ranks2: RankPool, seed: int) -> None:
    ranks2.run(_collectives_in_opposite_order, seed, timeout=60)
