"""The backward megakernel against the FP64 oracle, its promises bit for bit, and every way to take weight gradients."""

import pytest
import torch

from mok_megatron.executors.cpu import WeightGradTarget
from tests.gpu.backward_runs import (
    NAN,
    Gradients,
    Pass,
    assert_same,
    check_gradients,
    group_for,
    poison_backward_memory,
    random_dy,
    split_problem,
)
from tests.gpu.harness import Group, Problem, assert_rank_1_is_named, enter_for_rank_1, random_problem

SHAPES = [
    # tokens a rank, H, I, experts, K
    ([1], 64, 64, 2, 1),
    ([130], 64, 128, 4, 2),
    ([300], 128, 64, 4, 2),
    ([257], 256, 192, 8, 3),
    ([500], 320, 320, 4, 4),
    ([700], 512, 768, 4, 4),
    ([64, 0], 128, 128, 4, 2),
    ([300, 111], 256, 192, 8, 4),
    ([100, 5, 257, 64], 192, 128, 8, 3),
    ([70, 0, 129], 128, 192, 9, 3),
    ([33] * 8, 128, 192, 16, 6),
]


@pytest.mark.parametrize(("tokens", "hidden", "inner", "experts", "topk"), SHAPES)
def test_against_oracle(tokens: list[int], hidden: int, inner: int, experts: int, topk: int) -> None:
    for seed, dtype in enumerate((torch.bfloat16, torch.float32)):
        problem = random_problem(tokens, hidden, inner, experts, topk, seed=seed, missing=0.1 * seed)
        dys = random_dy(problem, seed + 100)
        group = group_for(problem)
        run = Pass(group, problem, dys, split=seed == 1)
        poison_backward_memory(group)
        # fp32: accumulated into zeros; bf16: written over NaN.
        got = run.backward(run.new_grads(dtype, 0.0 if seed else NAN), overwrite=seed == 0)
        check_gradients(problem, dys, got, dtype)


def test_no_tokens_anywhere() -> None:
    problem = random_problem([0, 0], 128, 128, 4, 2, seed=1)
    # The largest number of tokens sizes the buffers.
    group = Group(2, 8, 2, 128, 128, 4)
    run = Pass(group, problem, random_dy(problem, 1))
    got = run.backward(run.new_grads(torch.float32, NAN), overwrite=True)
    assert got.dx.shape == (0, 128)
    assert not got.dw13.any()
    assert not got.dw2.any()


@pytest.mark.parametrize("ep_size", [1, 2])
def test_router_weights_zero_and_negative(ep_size: int) -> None:
    problem = random_problem([200] * ep_size, 256, 192, 8, 3, seed=9)
    for weights in problem.router_weights:
        weights[:, 0] = 0.0
        weights[:, 1] *= -1.5
    dys = random_dy(problem, 4)
    run = Pass(group_for(problem), problem, dys)
    got = run.backward(run.new_grads(torch.float32, NAN), overwrite=True)
    check_gradients(problem, dys, got, torch.float32)
    assert got.d_router_weights[:, 0].abs().min() > 0


def test_padding_of_the_weights_grads_is_left_alone() -> None:
    """Guard bytes around every gradient keep their value where tiles stick out of the matrix."""
    problem = random_problem([150], 320, 192, 4, 2, seed=3)
    dys = random_dy(problem, 5)
    run = Pass(group_for(problem), problem, dys)
    for dtype in (torch.float32, torch.bfloat16):
        guarded = [torch.full((4, w.shape[1] + 128, w.shape[2]), 3.0, dtype=dtype, device="cuda") for w in (problem.w13, problem.w2)]
        inner = tuple(g[:, 64:-64] for g in guarded)
        run.backward([inner], overwrite=True)
        for g in guarded:
            assert (g[:, :64] == 3.0).all()
            assert (g[:, -64:] == 3.0).all()


KNOBS = (
    {"minibatch": 128},
    {"minibatch": 384},
    {"minibatch": 128, "macrobatch": 128},
    {"minibatch": 256, "macrobatch": 1024},
    {"minibatch": 128, "macrobatch": 512},
    {"minibatch": 1408, "macrobatch": 1408},
)


def _gradients(problem: Problem, dys: list[torch.Tensor], what: object, **options) -> Gradients:
    """Twice on the same buffers, poisoned in between."""
    group = group_for(problem, **options)
    run = Pass(group, problem, dys)
    poison_backward_memory(group)
    first = run.backward(run.new_grads(torch.float32, NAN), overwrite=True)
    poison_backward_memory(group)
    second = run.backward(run.new_grads(torch.float32, NAN), overwrite=True)
    assert_same(first, second, ("second run", what))
    return second


def test_same_bits_for_every_knob_and_ep_size() -> None:
    tokens, hidden, inner, experts, topk = 1024, 256, 320, 8, 4
    one = random_problem([tokens], hidden, inner, experts, topk, seed=77, missing=0.05)
    dys = random_dy(one, 78)
    want = _gradients(one, dys, "defaults")
    check_gradients(one, dys, want, torch.float32)
    for options in KNOBS:
        assert_same(_gradients(one, dys, options, **options), want, options)
    for ep_size in (2, 4):
        step = tokens // ep_size
        split = split_problem(one, [step] * ep_size)
        for options in ({}, {"minibatch": 128, "macrobatch": 256}):
            assert_same(_gradients(split, list(dys[0].split(step)), (ep_size, options), **options), want, (ep_size, options))


@pytest.mark.parametrize("macrobatch", [None, 256])
def test_main_grad_modes(macrobatch: int | None) -> None:
    """Every mode gives the sum of the overwritten fp32 gradient, rounded once where the target is bf16; cold experts too."""
    problem = random_problem([400], 256, 192, 8, 3, seed=21)
    # Experts 1 and 6 are cold.
    routes = problem.topk_experts[0]
    routes[(routes == 1) | (routes == 6)] = -1
    dys = random_dy(problem, 22)
    run = Pass(group_for(problem, **({} if macrobatch is None else {"minibatch": 128, "macrobatch": macrobatch})), problem, dys)
    sums = run.backward(run.new_grads(torch.float32, NAN), overwrite=True)
    check_gradients(problem, dys, sums, torch.float32)
    for cold in (1, 6):
        assert not sums.dw13[cold].any()
        assert not sums.dw2[cold].any()
    for dtype in (torch.float32, torch.bfloat16):
        written = run.backward(run.new_grads(dtype, NAN), overwrite=True)
        grads = run.new_grads(dtype, 7.0)
        before = [g.copy_(torch.randn(g.shape, device="cuda")).cpu() for g in grads[0]]
        for g, b in zip(grads[0], before, strict=True):
            g[[1, 6]], b[[1, 6]] = 7.0, 7.0
        added = run.backward(grads, overwrite=False)
        for name, start in zip(("dw13", "dw2"), before, strict=True):
            total = getattr(sums, name)
            assert torch.equal(getattr(written, name), total.to(dtype)), (dtype, name)
            assert torch.equal(getattr(added, name), (start.float() + total).to(dtype)), (dtype, name)
        assert torch.equal(added.dx, sums.dx)
    # No gradient for some matrices, the two ways mixed for the others.
    grads = run.new_grads(torch.float32, 1.0)
    targets = []
    for kind, tensor in enumerate(grads[0]):
        targets.append([WeightGradTarget(None if e % 3 == kind else matrix, e % 2 == 0) for e, matrix in enumerate(tensor)])
    mixed = run.backward(grads, False, targets=[targets])
    for kind, name in enumerate(("dw13", "dw2")):
        for expert in range(8):
            total, got = getattr(sums, name)[expert], getattr(mixed, name)[expert]
            want = torch.ones_like(total) if expert % 3 == kind else total if expert % 2 == 0 else total + 1.0
            assert torch.equal(got, want), (name, expert)
    assert torch.equal(mixed.dx, sums.dx)
    none = [([WeightGradTarget(None, False)] * 8, [WeightGradTarget(None, False)] * 8)]
    nothing = run.backward(grads, False, targets=none)
    assert torch.equal(nothing.dx, sums.dx)
    assert torch.equal(nothing.d_router_weights, sums.d_router_weights)


@pytest.mark.parametrize(("factors", "total"), [((1, 2, 4, 8), 15), ((256, 1), 257)])
def test_microbatches_sum_exactly(factors: tuple[int, ...], total: int) -> None:
    """One token an expert and dy of powers of two: a microbatch's gradients are the first one's times its factor, to the bit, and sums in fp32
    main_grad are rounded once at most, as the product is."""
    problem = random_problem([1], 128, 128, 2, 2, seed=5)
    group = group_for(problem)
    ones = [torch.ones(1, 128).bfloat16()]
    run = Pass(group, problem, ones)
    unit = run.backward(run.new_grads(torch.float32, NAN), overwrite=True)
    grads = run.new_grads(torch.float32, 0.0)
    for factor in factors:
        run.operands[0][0].fill_(factor)
        summed = run.backward(grads, overwrite=False)
    for name in ("dw13", "dw2"):
        assert getattr(unit, name).any()
        assert torch.equal(getattr(summed, name), total * getattr(unit, name)), name


@pytest.mark.parametrize("ep_size", [1, 2])
def test_recompute(ep_size: int) -> None:
    """The context of the forward again, bit for bit, where rows are."""
    problem = random_problem([200] * ep_size, 256, 192, 8, 3, seed=31, missing=0.1)
    for options in ({}, {"minibatch": 128, "macrobatch": 256}):
        run = Pass(group_for(problem, **options), problem, random_dy(problem, 1))
        made = run.recompute()
        for rank, context in enumerate(made):
            rows = min(int(run.schedules[rank].num_rows), run.group.macrobatch)
            assert rows > 0
            for name in ("x_rows", "gate_up"):
                assert torch.equal(getattr(context, name)[:rows], getattr(run.contexts[rank], name)[:rows]), (options, name)


@pytest.mark.parametrize("entered", [False, True])
def test_a_missing_peer_is_reported(entered: bool) -> None:
    """One rank comes to the forward and not to the backward, or never to its end: the other's kernel ends by itself and names it."""
    problem = random_problem([64, 64], 128, 128, 4, 2, seed=3)
    run = Pass(group_for(problem), problem, random_dy(problem, 4))
    group = run.group
    grads = run.new_grads(torch.float32, 0.0)
    if entered:
        enter_for_rank_1(group)
    group.synchronize_devices()
    with torch.cuda.stream(group.streams[0]):
        group.executors[0].backward(
            run.schedules[0],
            run.contexts[0],
            *run.operands[0],
            *run.words(grads[0], False),
            timeout_seconds=0.5,
            sm_reserve=group.sm_reserve,
        )
    group.synchronize()
    assert_rank_1_is_named(group, entered)


@pytest.mark.parametrize("tokens", [300, 1700])
def test_graph_replay(tokens: int) -> None:
    """A captured backward follows its inputs; each replay adds to main_grad once, also in L2 where an expert has many rows."""
    problem = random_problem([tokens], 256, 192, 8, 3, seed=41, missing=0.1)
    problem.topk_experts[0][:, 0] = 0
    dys = random_dy(problem, 42)
    run = Pass(group_for(problem), problem, dys)
    want = run.backward(run.new_grads(torch.float32, NAN), overwrite=True)
    grads = run.new_grads(torch.float32, 0.0)
    executor, graph = run.group.executors[0], torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        dx, d_router_weights = executor.backward(
            run.schedules[0], run.contexts[0], *run.operands[0], *run.words(grads[0], False), timeout_seconds=5.0
        )
    sums = [torch.zeros_like(want.dw13), torch.zeros_like(want.dw2)]
    for replay in range(3):
        dx.fill_(NAN)
        graph.replay()
        torch.cuda.synchronize()
        assert executor.fault[0] == 0
        assert torch.equal(dx.cpu(), want.dx)
        assert torch.equal(d_router_weights.cpu(), want.d_router_weights)
        for kind, total in enumerate((want.dw13, want.dw2)):
            sums[kind] = sums[kind] + total
            assert torch.equal(grads[0][kind].cpu(), sums[kind]), replay
    run.operands[0][0].zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert not dx.any()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs with peer access")
def test_two_gpus() -> None:
    """Rows and gradients of rows over NVLink: the same bits as both ranks on one GPU, every time."""
    problem = random_problem([2048, 1500], 512, 320, 8, 4, seed=9, missing=0.05)
    for routes in problem.topk_experts:
        routes[:, 0] = 0
    dys = random_dy(problem, 10)
    run = Pass(group_for(problem), problem, dys)
    want = run.backward(run.new_grads(torch.float32, 0.0), overwrite=False)
    for options in ({}, {"minibatch": 128, "macrobatch": 2048}):
        run = Pass(group_for(problem, devices=[0, 1], **options), problem, dys)
        for repeat in range(5):
            poison_backward_memory(run.group)
            assert_same(run.backward(run.new_grads(torch.float32, 0.0), overwrite=False), want, (options, repeat))
