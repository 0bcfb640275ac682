"""P1, P2, P3 of the design on GPUs, bit for bit, beyond the knobs that the kernels' own tests turn.

P1: the same inputs and config give the same bits in every run. P2: y, dx and d_router_weights do not change with knobs, EP size or the values
of other tokens. P3: weight gradients do not change with knobs or EP size.
"""

import dataclasses

import pytest
import torch

from mok_megatron.bench.workloads import dealt_routes
from tests.distributed import RankPool
from tests.gpu.backward_runs import Gradients, Pass, assert_same_bits, group_for, poison_backward_memory, random_dy, split_problem
from tests.gpu.harness import Problem, random_problem
from tests.gpu.ranks import EXPERTS, HIDDEN, INNER, TOPK, Part, poison_shared, start, take_part, two_gpus

REPEATS = 20
# Expert 2's fp32 gradient is added to in L2, expert 5's is not, expert 6 is cold: 37 blocks of rows.
ROWS = [300, 90, 2000, 1, 700, 900, 0, 129]
NAMES = ("y", "dx", "d_router_weights", "dw13", "dw2")


def _batch(seed: int) -> tuple[Problem, torch.Tensor]:
    routes = dealt_routes(ROWS, TOPK)
    problem = random_problem([len(routes)], HIDDEN, INNER, EXPERTS, TOPK, seed=seed)
    problem.topk_experts[0] = routes
    return problem, random_dy(problem, seed + 1)[0]


def _repeats(rank: int, tokens: list[int], seed: int, knobs: dict) -> list[torch.Tensor]:
    """The same step again and again, in other memory each time, with the buffers poisoned and products on another stream beside it."""
    mok, config, workspace = start(rank, len(tokens), num_local_tokens=sum(tokens), **knobs)
    part = take_part(*_batch(seed), tokens, rank)
    generator = torch.Generator().manual_seed(seed + 2)
    whole = [torch.randn(EXPERTS, *w.shape[1:], generator=generator) for w in (part.w13, part.w2)]
    share = EXPERTS // len(tokens)
    mine = [w[rank * share : (rank + 1) * share].to(part.x.device) for w in whole]
    flags = [(e + rank * share) % 2 == 1 for e in range(share)]
    side, busy = torch.cuda.Stream(), torch.randn(1024, 1024, device=part.x.device).bfloat16()
    torch.cuda.synchronize()
    first, kept, seen = None, [], set()
    for repeat in range(REPEATS):
        with torch.cuda.stream(side):
            for _ in range(20):
                busy = busy @ busy
        now = Part(*(getattr(part, field.name).clone() for field in dataclasses.fields(Part)))
        grads = [g.clone() for g in mine]
        weights = [list(w) if repeat % 2 else w for w in (now.w13, now.w2)]
        poison_shared(workspace)
        schedule = mok.build_schedule(workspace, config, now.routes)
        y, context = mok.forward(config, workspace, schedule, now.x, now.p, *weights)
        passed = tuple(list(g) if repeat % 3 else g for g in grads)
        dx, dp, _, _ = mok.backward(
            config, workspace, schedule, context, now.dy, now.x, now.p, *weights, main_grads=passed, overwrite_main_grads=(False, flags)
        )
        results = [y, dx, dp, *grads]
        first = first or results
        kept.append((now, results))
        seen.add(now.w13.data_ptr())
        if len(kept) > 4:
            kept = kept[2:]
        for name, one, other in zip(NAMES, results, first, strict=True):
            assert_same_bits(name, one, other, f"repeat {repeat}")
    assert len(seen) > 2
    return [t.cpu() for t in first]


RINGS = ({}, {"minibatch_size": 128, "macrobatch_size": 1664}, {"minibatch_size": 128, "macrobatch_size": 896, "sm_reserve": 90})


def test_p1_p2_p3_repeats_with_fresh_memory(ranks2: RankPool, seed: int) -> None:
    """One macrobatch, three with replay, six."""
    runs = [ranks2.run(_repeats, [max(ROWS)], seed, knobs, ranks=1, timeout=120)[0] for knobs in RINGS]
    for knobs, run in zip(RINGS, runs, strict=True):
        for name, one, other in zip(NAMES, run, runs[0], strict=True):
            assert_same_bits(name, one, other, knobs)


@two_gpus
def test_p1_p2_p3_repeats_on_two_ranks(ranks2: RankPool, seed: int) -> None:
    want = ranks2.run(_repeats, [max(ROWS)], seed, {}, ranks=1, timeout=120)[0]
    for tokens, knobs in (([1000, 1000], {}), ([1999, 1], RINGS[1]), ([0, 2000], RINGS[2])):
        ranks = ranks2.run(_repeats, tokens, seed, knobs, timeout=120)
        for index, name in enumerate(NAMES):
            assert_same_bits(name, torch.cat([results[index] for results in ranks]), want[index], (tokens, knobs))


def _results(problem: Problem, dys: list[torch.Tensor], **options) -> tuple[torch.Tensor, Gradients]:
    """y of all ranks and the gradients."""
    run = Pass(group_for(problem, **options), problem, dys)
    poison_backward_memory(run.group)
    got = run.backward(run.new_grads(torch.float32, 0.0), overwrite=True)
    return torch.cat(run.outputs), got


def _assert_tokens_same(kept: torch.Tensor, one: tuple[torch.Tensor, Gradients], other: tuple[torch.Tensor, Gradients], what: object) -> None:
    assert_same_bits("y", one[0][kept], other[0][kept], what)
    for name in ("dx", "d_router_weights"):
        assert_same_bits(name, getattr(one[1], name)[kept], getattr(other[1], name)[kept], what)


SPLITS = [([601], {}), ([601], {"minibatch": 128, "macrobatch": 256}), ([300, 301], {"minibatch": 128, "macrobatch": 128})]


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -3.0], ids=["nan", "inf", "number"])
@pytest.mark.parametrize(("tokens", "options"), SPLITS, ids=["one rank", "macrobatches", "two ranks"])
def test_p2_other_tokens_do_not_show(tokens: list[int], options: dict, poison: float, seed: int) -> None:
    """Every other token's values replaced, in x, dy and router weights."""
    problem = random_problem([601], 256, 192, 8, 3, seed=seed, missing=0.1)
    dy = random_dy(problem, seed + 1)[0]
    kept = torch.arange(601) % 2 == 0
    changed = dataclasses.replace(problem, x=[problem.x[0].clone()], router_weights=[problem.router_weights[0].clone()])
    changed_dy = dy.clone()
    for tensor in (changed.x[0], changed.router_weights[0], changed_dy):
        tensor[~kept] = poison
    want = _results(split_problem(problem, tokens), list(dy.split(tokens)), **options)
    got = _results(split_problem(changed, tokens), list(changed_dy.split(tokens)), **options)
    _assert_tokens_same(kept, got, want, poison)
    assert not torch.equal(got[0][~kept], want[0][~kept])


@pytest.mark.parametrize("every", [7, 300, 601])
def test_p2_neighbours_may_come_and_go(every: int, seed: int) -> None:
    """A token keeps its bits when others lose their routes, and it moves to another row of another tile or is alone in its expert."""
    problem = random_problem([601], 256, 192, 8, 3, seed=seed, missing=0.1)
    dys = random_dy(problem, seed + 1)
    want = _results(problem, dys)
    kept = torch.arange(601) % every == every // 2
    routes = problem.topk_experts[0].clone()
    routes[~kept] = -1
    fewer = dataclasses.replace(problem, topk_experts=[routes])
    got = _results(fewer, dys)
    _assert_tokens_same(kept, got, want, every)
    for result in (got[0], got[1].dx, got[1].d_router_weights):
        assert not result[~kept].any()
