"""The forward megakernel against the FP64 oracle, and its promises bit for bit."""

import pytest
import torch

from tests.gpu.harness import Group, Problem, assert_rank_1_is_named, enter_for_rank_1, expected, poison, random_problem
from tests.oracle import assert_within


def _check(problem: Problem, outputs: list[torch.Tensor]) -> None:
    assert_within("y", torch.cat(outputs), expected(problem).y)


SHAPES = [
    # tokens a rank, H, I, experts, K
    ([1], 64, 64, 2, 1),
    ([130], 64, 128, 4, 2),
    ([300], 128, 64, 4, 2),
    ([257], 256, 192, 8, 3),
    ([500], 320, 320, 4, 4),
    ([512], 512, 256, 8, 8),
    ([200], 1024, 128, 16, 5),
    ([64, 0], 128, 128, 4, 2),
    ([300, 111], 256, 192, 8, 4),
    ([100, 5, 257, 64], 192, 128, 8, 3),
    ([70, 0, 129], 128, 192, 9, 3),
    ([33] * 8, 128, 192, 16, 6),
]


@pytest.mark.parametrize(("tokens", "hidden", "inner", "experts", "topk"), SHAPES)
def test_against_oracle(tokens: list[int], hidden: int, inner: int, experts: int, topk: int) -> None:
    group = Group(len(tokens), max(tokens), topk, hidden, inner, experts)
    for seed in range(3):
        problem = random_problem(tokens, hidden, inner, experts, topk, seed=seed, missing=0.1 * seed)
        outputs, _, _ = group.forward(problem, save=seed == 1, split=seed == 2)
        _check(problem, outputs)


@pytest.mark.parametrize("ep_size", [1, 2])
def test_context(ep_size: int) -> None:
    """x rows as fetched and gate and up within their bound, padding rows zero."""
    tokens, hidden, inner, experts, topk = [200] * ep_size, 256, 192, 8, 3
    group = Group(ep_size, 200, topk, hidden, inner, experts)
    problem = random_problem(tokens, hidden, inner, experts, topk, seed=5, missing=0.1)
    _, contexts, schedules = group.forward(problem, save=True)
    for rank in range(ep_size):
        made, context = schedules[rank], contexts[rank]
        rows = int(made.num_rows)
        source, slot = made.row_source_rank[:rows].cpu(), made.row_source_slot[:rows].cpu()
        x_rows, gate_up = context.x_rows[:rows].cpu(), context.gate_up[:rows].cpu().double()
        offsets = made.expert_row_offsets.tolist()
        for expert in range(group.local):
            for row in range(offsets[expert], offsets[expert + 1]):
                if source[row] < 0:
                    assert not x_rows[row].any()
                    assert not gate_up[row].any()
                    continue
                x = problem.x[source[row]][slot[row] // topk]
                assert torch.equal(x_rows[row], x)
            here = slice(offsets[expert], offsets[expert + 1])
            w13 = problem.w13[rank * group.local + expert].double()
            want = x_rows[here].double() @ w13.T
            bound = 2**-8 * want.abs() + 2**-24 * hidden**0.5 * (x_rows[here].double().abs() @ w13.T.abs())
            assert ((gate_up[here] - want).abs() <= bound).all()


def _outputs(problem: Problem, ep_size: int, tokens: int, **options) -> torch.Tensor:
    save, comm = options.pop("save", False), options.pop("num_comm_sms", 0)
    hidden, inner = problem.w2.shape[1:]
    group = Group(ep_size, tokens, problem.topk_experts[0].shape[1], hidden, inner, problem.w13.shape[0], **options)
    # Twice on the same buffers: what the first pass left must not show in the second.
    first, _, _ = group.forward(problem, save=save, num_comm_sms=comm)
    for memory in group.memory:
        poison(memory.combine)
        poison(memory.x)
    second, _, _ = group.forward(problem, save=save, num_comm_sms=comm)
    assert torch.equal(torch.cat(first).view(torch.int16), torch.cat(second).view(torch.int16))
    return torch.cat(second)


def test_same_bits_for_every_knob_and_ep_size() -> None:
    tokens, hidden, inner, experts, topk = 1024, 256, 320, 8, 4
    one = random_problem([tokens], hidden, inner, experts, topk, seed=77, missing=0.05)
    want = _outputs(one, 1, tokens)
    for options in (
        {"minibatch": 128},
        {"minibatch": 384},
        {"minibatch": 128, "macrobatch": 128},
        {"minibatch": 256, "macrobatch": 1024, "save": True},
        {"minibatch": 128, "macrobatch": 512},
        {"num_comm_sms": 2},
        {"num_comm_sms": 9, "minibatch": 256, "macrobatch": 512},
    ):
        assert torch.equal(_outputs(one, 1, tokens, **options).view(torch.int16), want.view(torch.int16)), options
    for ep_size in (2, 4):
        step = tokens // ep_size
        split = Problem(
            list(one.x[0].split(step)), list(one.router_weights[0].split(step)), list(one.topk_experts[0].split(step)), one.w13, one.w2
        )
        for options in ({}, {"minibatch": 128, "macrobatch": 256}):
            got = _outputs(split, ep_size, tokens, **options)
            assert torch.equal(got.view(torch.int16), want.view(torch.int16)), (ep_size, options)


@pytest.mark.parametrize("entered", [False, True])
def test_a_missing_peer_is_reported(entered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank does not come to the forward, or never to its end: the other's kernel ends by itself and names it."""
    monkeypatch.setattr("tests.gpu.harness.TIMEOUT_SECONDS", 0.5)
    group = Group(2, 64, 2, 128, 128, 4)
    problem = random_problem([64, 64], 128, 128, 4, 2, seed=3)
    schedules = group.schedules(problem.topk_experts)
    if entered:
        enter_for_rank_1(group)
    with torch.cuda.stream(group.streams[0]):
        group.executors[0].forward(
            schedules[0],
            problem.x[0].cuda(),
            problem.router_weights[0].cuda(),
            problem.w13[:2].cuda(),
            problem.w2[:2].cuda(),
            context=None,
            timeout_seconds=0.5,
            sm_reserve=group.sm_reserve,
        )
    group.synchronize()
    assert_rank_1_is_named(group, entered)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs with peer access")
@pytest.mark.parametrize(("tokens", "hidden", "inner", "experts", "topk"), [([700, 300], 512, 320, 8, 4), ([2048, 2048], 2048, 768, 32, 8)])
def test_two_gpus(tokens: list[int], hidden: int, inner: int, experts: int, topk: int) -> None:
    """Rows over NVLink: within the oracle's bound where that is small enough to evaluate, and the same bits as both ranks on one GPU."""
    problem = random_problem(tokens, hidden, inner, experts, topk, seed=9, missing=0.05)
    across = Group(2, max(tokens), topk, hidden, inner, experts, devices=[0, 1])
    for repeat in range(5):
        for memory in across.memory:
            poison(memory.combine)
        outputs, _, _ = across.forward(problem, save=repeat % 2 == 1)
        if repeat == 0:
            first = torch.cat(outputs)
            if hidden <= 512:
                _check(problem, outputs)
        assert torch.equal(torch.cat(outputs).view(torch.int16), first.view(torch.int16))
    one, _, _ = Group(2, max(tokens), topk, hidden, inner, experts).forward(problem)
    assert torch.equal(torch.cat(one).view(torch.int16), first.view(torch.int16))
