"""Weight gradients of experts with many rows: an accumulated fp32 gradient is added to in L2 from some number of rows on.

Whatever way an element takes, it gets one addition a pass, of the sum that an overwritten gradient holds: that is what is compared here, bit
for bit, on both sides of the limit.
"""

import pytest
import torch

from mok_megatron.bench.workloads import dealt_routes
from mok_megatron.executors.cpu import WeightGradTarget
from tests.gpu.backward_runs import (
    NAN,
    Gradients,
    Pass,
    assert_same,
    assert_same_bits,
    check_gradients,
    group_for,
    poison_backward_memory,
    random_dy,
    split_problem,
)
from tests.gpu.harness import Problem, random_problem

TOPK = 2
STAGE_ROWS, LEAST_STAGES = 64, 6  # csrc/epilogue/sm90_weight_grad.cuh: from so many stages of an expert's rows on
BLOCK = 128
GUARD = 64
# Padded: 1, 26, 1, 0, 14 and 1 blocks.
ROWS = [90, 3300, 3, 0, 1700, 1]
# Rows of the ring: all of them; the largest expert straddles a boundary and is added in L2 behind it; it straddles two and is not; one block.
MACROBATCHES = (None, 14 * BLOCK, 13 * BLOCK, BLOCK)
SIZES = [(320, 192), (192, 320), (64, 64)]  # H, I: tiles of 256 columns and of 128 rows stick out


def _last_stages(rows: list[int], macrobatch: int | None) -> list[int]:
    """Stages of every expert's last part, the one whose tiles are added to the gradient."""
    stages, first = [], 0
    for count in rows:
        blocks = -(-count // BLOCK)
        ring = (macrobatch or (first + blocks) * BLOCK) // BLOCK
        begin = max(first, (first + blocks - 1) // ring * ring) if count else first
        half = 0 < count - (blocks - 1) * BLOCK <= STAGE_ROWS
        stages.append(2 * (first + blocks - begin) - half)
        first += blocks
    return stages


def _in_l2(rows: list[int], macrobatch: int | None) -> set[int]:
    return {expert for expert, stages in enumerate(_last_stages(rows, macrobatch)) if stages >= LEAST_STAGES}


def _problem(rows: list[int], hidden: int, inner: int, seed: int) -> Problem:
    """One rank's, with exactly so many rows an expert."""
    routes = dealt_routes(rows, TOPK)
    problem = random_problem([len(routes)], hidden, inner, len(rows), TOPK, seed=seed)
    problem.topk_experts[0] = routes
    return problem


def _options(macrobatch: int | None) -> dict[str, int]:
    return {} if macrobatch is None else {"minibatch": BLOCK, "macrobatch": macrobatch}


class Guarded:
    """Gradients of every rank with rows around every expert's matrix, which must keep their value."""

    def __init__(self, run: Pass, dtype: torch.dtype, seed: int | None) -> None:
        """Filled with normal numbers, or with NaN where seed is None. `start`: what they hold now, of all experts, on the CPU."""
        group, weights = run.group, (run.problem.w13, run.problem.w2)
        generator = torch.Generator().manual_seed(seed or 0)
        self.start = [torch.full(w.shape, NAN) if seed is None else torch.randn(w.shape, generator=generator) for w in weights]
        self.start = [s.to(dtype) for s in self.start]
        self.grads, self._whole = [], []
        for rank, device in enumerate(group.devices):
            pair = []
            for start in self.start:
                mine = start[rank * group.local : (rank + 1) * group.local]
                whole = torch.full((group.local, mine.shape[1] + 2 * GUARD, mine.shape[2]), 3.0, dtype=dtype, device=device)
                pair.append(whole[:, GUARD:-GUARD].copy_(mine))
                self._whole.append(whole)
            self.grads.append(tuple(pair))
        group.synchronize_devices()

    def check_guards(self, what: object) -> None:
        for whole in self._whole:
            assert (whole[:, :GUARD] == 3.0).all(), what
            assert (whole[:, -GUARD:] == 3.0).all(), what


def _check_modes(run: Pass, sums: Gradients, seed: int, what: object) -> None:
    """Overwritten, accumulated, and the two mixed, against the sums."""
    for dtype in (torch.float32, torch.bfloat16):
        for overwrite in (True, False):
            poison_backward_memory(run.group)
            into = Guarded(run, dtype, None if overwrite else seed)
            got = run.backward(into.grads, overwrite)
            into.check_guards((what, dtype, overwrite))
            for name, start in zip(("dw13", "dw2"), into.start, strict=True):
                total = getattr(sums, name)
                want = total if overwrite else start.float() + total
                assert_same_bits(name, getattr(got, name), want.to(dtype), (what, dtype, overwrite))
            assert_same_bits("dx", got.dx, sums.dx, what)
            assert_same_bits("d_router_weights", got.d_router_weights, sums.d_router_weights, what)


@pytest.mark.parametrize(("hidden", "inner"), SIZES)
def test_every_macrobatch_and_ep_size_adds_the_same_sum(hidden: int, inner: int, seed: int) -> None:
    """Values against the oracle; every way into the gradient, whichever experts are added to in L2, the same bits."""
    assert [_in_l2(ROWS, m) for m in MACROBATCHES] == [{1, 4}, {1, 4}, set(), set()]
    problem = _problem(ROWS, hidden, inner, seed)
    dys = random_dy(problem, seed + 1)
    sums = None
    for macrobatch in MACROBATCHES:
        run = Pass(group_for(problem, **_options(macrobatch)), problem, dys)
        poison_backward_memory(run.group)
        got = run.backward(run.new_grads(torch.float32, NAN), overwrite=True)
        if sums is None:
            sums = got
            check_gradients(problem, dys, sums, torch.float32)
        assert_same(got, sums, macrobatch)
        _check_modes(run, sums, seed + 2, macrobatch)
    tokens = problem.x[0].shape[0]
    parts = [tokens // 3, tokens - tokens // 3]
    split, split_dys = split_problem(problem, parts), list(dys[0].split(parts))
    for macrobatch in MACROBATCHES[:2]:
        run = Pass(group_for(split, **_options(macrobatch)), split, split_dys)
        _check_modes(run, sums, seed + 3, ("EP 2", macrobatch))


@pytest.mark.parametrize("rows", [320, 321, 384, 385])
def test_around_the_limit(rows: int, seed: int) -> None:
    """5 stages with the last half block empty, 6, 6 and 7."""
    counts = [1, rows, 130]
    assert _last_stages(counts, None)[1] == {320: 5, 321: 6, 384: 6, 385: 7}[rows]
    problem = _problem(counts, 320, 192, seed)
    dys = random_dy(problem, seed + 1)
    run = Pass(group_for(problem), problem, dys)
    sums = run.backward(run.new_grads(torch.float32, NAN), overwrite=True)
    check_gradients(problem, dys, sums, torch.float32)
    _check_modes(run, sums, seed + 2, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_around_every_step(dtype: torch.dtype, seed: int) -> None:
    """Rows that end at, before and behind each step of 16, in the first half of a block and in the second: none is left out."""
    rows = [0, *(16 * step + more for step in range(9) for more in (-1, 0, 1) if 16 * step + more > 0)]
    problem = _problem(rows, 192, 320, seed)
    dys = random_dy(problem, seed + 1)
    sums = None
    for macrobatch in (None, BLOCK):
        run = Pass(group_for(problem, **_options(macrobatch)), problem, dys)
        poison_backward_memory(run.group)
        got = run.backward(run.new_grads(dtype, NAN), overwrite=True)
        if sums is None:
            sums = got
            check_gradients(problem, dys, sums, dtype)
        assert_same(got, sums, macrobatch)


def test_each_expert_its_own_way(seed: int) -> None:
    """Large and small experts in one call: overwritten, accumulated, or without a gradient."""
    rows = [1700, 40, 1600, 1650, 0, 5]
    problem = _problem(rows, 192, 320, seed)
    dys = random_dy(problem, seed + 1)
    run = Pass(group_for(problem), problem, dys)
    sums = run.backward(run.new_grads(torch.float32, NAN), overwrite=True)
    into = Guarded(run, torch.float32, seed + 2)
    ways = [["add", "over", "none", "over", "add", "add"], ["over", "add", "add", "none", "over", "none"]]
    targets = tuple(
        [WeightGradTarget(None if way == "none" else matrix, way == "over") for way, matrix in zip(chosen, grads, strict=True)]
        for chosen, grads in zip(ways, into.grads[0], strict=True)
    )
    got = run.backward(into.grads, False, targets=[targets])
    into.check_guards(ways)
    for name, start, chosen in zip(("dw13", "dw2"), into.start, ways, strict=True):
        for expert, way in enumerate(chosen):
            total, before = getattr(sums, name)[expert], start[expert]
            want = {"none": before, "over": total, "add": before + total}[way]
            assert_same_bits(name, getattr(got, name)[expert], want, (expert, way))
    assert_same_bits("dx", got.dx, sums.dx, ways)


def test_passes_in_a_row_add_in_order(seed: int) -> None:
    """Passes of which each adds to the same gradient in another way, and the host waits for none: fp32 sums depend on the order."""
    group, runs, sums = None, [], []
    many, few = [90, 1700, 3, 40], [1600, 30, 0, 1500]
    for step, rows in enumerate((many, few)):
        problem = _problem(rows, 320, 192, seed)
        # The buffers fit the larger one.
        group = group or group_for(problem)
        runs.append(Pass(group, problem, random_dy(problem, seed + step)))
        sums.append(runs[-1].backward(runs[-1].new_grads(torch.float32, NAN), overwrite=True))
    assert _in_l2(many, None) == {1}
    assert _in_l2(few, None) == {0, 3}
    into = Guarded(runs[0], torch.float32, seed + 2)
    order = (0, 1, 0, 0, 1, 0)
    kept = [runs[which].launch(into.grads, False) for which in order]
    runs[0].finish()
    into.check_guards(order)
    for kind, name in enumerate(("dw13", "dw2")):
        want = into.start[kind]
        for which in order:
            want = want + getattr(sums[which], name)
        assert_same_bits(name, into.grads[0][kind].cpu(), want, order)
    for which, results in zip(order, kept, strict=True):
        assert_same_bits("dx", results[0][0].cpu(), sums[which].dx, which)


def test_subnormal_gradients_are_kept_either_way(seed: int) -> None:
    """Gradients at the lower end of fp32: the bits do not tell which way an expert took."""
    problem = _problem(ROWS, 192, 128, seed)
    tiny = torch.finfo(torch.float32).tiny
    dys = [(dy.float() * tiny).bfloat16() for dy in random_dy(problem, seed + 1)]
    g = torch.Generator().manual_seed(seed + 2)
    starts = [torch.randn(w.shape, generator=g) * tiny for w in (problem.w13, problem.w2)]
    first = None
    for macrobatch in MACROBATCHES:
        run = Pass(group_for(problem, **_options(macrobatch)), problem, dys)
        sums = run.backward(run.new_grads(torch.float32, NAN), overwrite=True)
        grads = [tuple(start.to(run.group.devices[0]) for start in starts)]
        got = run.backward(grads, overwrite=False)
        for name, start in zip(("dw13", "dw2"), starts, strict=True):
            want = start + getattr(sums, name)
            assert ((want != 0) & (want.abs() < tiny)).any()
            assert_same_bits(name, getattr(got, name), want, macrobatch)
        first = first or got
        assert_same(got, first, macrobatch)
