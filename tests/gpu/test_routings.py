"""Field cases of routing, forward and backward: cold, skewed, ragged, malformed and padded, and the benchmark's workloads."""

import dataclasses

import pytest
import torch

from mok_megatron.bench.routing import WORKLOADS, expert_counts, expert_ids, source_tokens
from tests.gpu.backward_runs import (
    NAN,
    Gradients,
    Pass,
    assert_same,
    assert_same_bits,
    check_gradients,
    poison_backward_memory,
    random_dy,
    split_problem,
)
from tests.gpu.harness import Group, Problem, random_problem
from tests.oracle import assert_within, moe_oracle

RING = {"minibatch": 128, "macrobatch": 128}


@dataclasses.dataclass
class Case:
    """A global batch: the problem of one rank, and dy."""

    problem: Problem
    dy: torch.Tensor

    @property
    def tokens(self) -> int:
        return self.problem.x[0].shape[0]


@dataclasses.dataclass
class Outcome:
    """Of all ranks: y, gradients, routes of every expert, and the pass that it came from."""

    y: torch.Tensor
    gradients: Gradients
    expert_rows: list[int]
    run: Pass


def _case(routes: torch.Tensor, seed: int, *, experts: int, hidden: int = 128, inner: int = 192) -> Case:
    problem = random_problem([len(routes)], hidden, inner, experts, routes.shape[1], seed=seed)
    problem.topk_experts[0] = routes.int()
    return Case(problem, random_dy(problem, seed + 1)[0])


def _random_case(tokens: int, seed: int, *, experts: int = 8, topk: int = 2, missing: float = 0.1, **sizes: int) -> Case:
    routes = random_problem([tokens], 64, 64, experts, topk, seed=seed, missing=missing).topk_experts[0]
    return _case(routes, seed, experts=experts, **sizes)


def _execute(case: Case, tokens: list[int], *, group: Group | None = None, fill: float | None = None, **options: int) -> Outcome:
    """Forward and backward with so many tokens a rank; weight gradients in fp32, overwritten, or added to `fill`."""
    problem = split_problem(case.problem, tokens)
    if group is None:
        # A rank without tokens has buffers for some.
        hidden, inner = problem.w2.shape[1:]
        group = Group(len(tokens), max(*tokens, 8), problem.topk_experts[0].shape[1], hidden, inner, problem.w13.shape[0], **options)
    run = Pass(group, problem, list(case.dy.split(tokens)))
    poison_backward_memory(group)
    gradients = run.backward(run.new_grads(torch.float32, NAN if fill is None else fill), overwrite=fill is None)
    rows = [count for schedule in run.schedules for count in schedule.expert_rows.tolist()]
    return Outcome(torch.cat(run.outputs), gradients, rows, run)


def _check(case: Case, got: Outcome) -> None:
    """Within the oracle's bounds, and every route counted."""
    problem = case.problem
    inputs = (problem.x[0], problem.router_weights[0], problem.topk_experts[0], problem.w13, problem.w2)
    want = moe_oracle(*inputs, dtype=torch.bfloat16)
    assert_within("y", got.y, want.y)
    assert got.expert_rows == want.counts.tolist()
    check_gradients(problem, [case.dy], got.gradients, torch.float32)


def _assert_equal(one: Outcome, other: Outcome, what: object) -> None:
    assert_same_bits("y", one.y, other.y, what)
    assert_same(one.gradients, other.gradients, what)


@pytest.mark.parametrize("name", WORKLOADS)
def test_f_t4_workloads(name: str, seed: int) -> None:
    """The counts that the generator promised; the oracle at EP 1, and the same bits at EP 2 and 4."""
    shape = {"num_tokens": 601, "num_experts": 16, "topk": 4}
    for step in range(2):
        case = _case(expert_ids(name, seed=seed, step=step, **shape), seed + step, experts=16)
        alone = _execute(case, [601])
        assert alone.expert_rows == expert_counts(name, seed=seed, step=step, **shape)
        _check(case, alone)
        for ep_size in (2, 4):
            tokens = source_tokens(name, seed=seed, step=step, num_tokens=601, ep_size=ep_size)
            _assert_equal(_execute(case, tokens, **(RING if step else {})), alone, (step, ep_size))


@pytest.mark.parametrize("options", [{}, RING], ids=["whole", "ring"])
@pytest.mark.parametrize("tokens", [[8, 8], [0, 8], [200, 200]], ids=["cold rank", "cold rank and source", "many"])
def test_a_t1_all_routes_to_rank_0(tokens: list[int], options: dict[str, int], seed: int) -> None:
    """The gradients of rank 1's experts keep what they hold."""
    case = _case(torch.tensor([[0, 1]]).repeat(sum(tokens), 1), seed, experts=4)
    got = _execute(case, tokens, fill=3.25, **options)
    for gradient in (got.gradients.dw13, got.gradients.dw2):
        assert (gradient[2:] == 3.25).all()
        assert (gradient[:2] != 3.25).any()
    _check(case, _execute(case, tokens, **options))


def test_a_t1_a_source_without_tokens_receives(seed: int) -> None:
    case = _random_case(8, seed, experts=4)
    _check(case, _execute(case, [0, 8]))
    empty = _random_case(0, seed, experts=4)
    got = _execute(empty, [0, 0])
    assert got.y.shape == (0, 128)
    assert not got.gradients.dw13.any()
    none = _random_case(8, seed, experts=4, missing=1.0)
    got = _execute(none, [3, 5])
    for result in (got.y, got.gradients.dx, got.gradients.d_router_weights, got.gradients.dw13, got.gradients.dw2):
        assert not result.any()


def test_a_t2_all_to_one_expert(seed: int) -> None:
    """2048 routes, 16 experts on 4 ranks, one of them takes all: default capacity, nothing dropped."""
    case = _case(torch.full((2048, 1), 5), seed, experts=16)
    got = _execute(case, [512] * 4)
    assert got.expert_rows == [2048 if expert == 5 else 0 for expert in range(16)]
    _check(case, got)
    _assert_equal(_execute(case, [512] * 4, minibatch=256, macrobatch=512), got, "ring")
    _assert_equal(_execute(case, [2048]), got, "one rank")


@pytest.mark.parametrize("tokens", [[3, 0, 517, 64], [4095, 4095], [672], [672, 1]])
def test_a_t3_ragged_ranks(tokens: list[int], seed: int) -> None:
    case = _random_case(sum(tokens), seed)
    got = _execute(case, tokens)
    _check(case, got)
    _assert_equal(got, _execute(case, [sum(tokens)]), "one rank")


def test_a_t3_one_rank_grows(seed: int) -> None:
    """64 tokens on both ranks, then 640 on one of them, in one workspace."""
    group = Group(2, 640, 2, 128, 192, 8)
    for step, tokens in enumerate([[64, 64], [64, 640], [0, 640], [64, 64]]):
        case = _random_case(sum(tokens), seed + step)
        _assert_equal(_execute(case, tokens, group=group), _execute(case, [sum(tokens)]), tokens)


def test_a_t4_missing_routes_are_never_expert_0(seed: int) -> None:
    """-1 adds nothing and gets no gradient, whatever its router weight is."""
    routes = torch.tensor([[-1, -1], [2, -1], [-1, 3], [0, 1]]).repeat(50, 1)
    case = _case(routes, seed, experts=4)
    want = _execute(case, [200])
    _check(case, want)
    case.problem.router_weights[0][routes < 0] = NAN
    for tokens in ([200], [65, 135]):
        got = _execute(case, tokens)
        _assert_equal(got, want, tokens)
        assert got.expert_rows == [50] * 4
        assert not got.y[::4].any()


def test_a_t5_a_router_weight_of_zero_has_a_gradient(seed: int) -> None:
    case = _random_case(160, seed, missing=0.0)
    case.problem.router_weights[0][:, 1] = 0.0
    got = _execute(case, [60, 100])
    _check(case, got)
    assert (got.gradients.d_router_weights[:, 1] != 0).all()
    case.problem.topk_experts[0][:, 1] = -1
    # The other route's share of a sum is 0 then, in either order.
    assert torch.equal(_execute(case, [60, 100]).y, got.y)


def test_a_t5_padding_tokens_are_not_dispatched(seed: int) -> None:
    """4 ranks with 64 tokens of which 48 are valid, top-2: 384 routes, and exactly 0 for the others, which hold NaN."""
    case = _random_case(256, seed, missing=0.0)
    pads = torch.arange(256) % 64 >= 48
    case.problem.topk_experts[0][pads] = -1
    case.problem.x[0][pads] = NAN
    case.dy[pads] = NAN
    got = _execute(case, [64] * 4, **RING)
    assert sum(got.expert_rows) == 384
    assert not got.y[pads].any()
    assert not got.gradients.dx[pads].any()
    whole = case.problem
    valid = Problem(*([getattr(whole, name)[0][~pads]] for name in ("x", "router_weights", "topk_experts")), whole.w13, whole.w2)
    want = _execute(Case(valid, case.dy[~pads]), [192])
    assert_same_bits("y", got.y[~pads], want.y, "padding")
    assert_same_bits("dx", got.gradients.dx[~pads], want.gradients.dx, "padding")
    for name in ("dw13", "dw2"):
        assert_same_bits(name, getattr(got.gradients, name), getattr(want.gradients, name), "padding")


@pytest.mark.parametrize("topk", [1, 2, 8])
@pytest.mark.parametrize("tokens", [255, 256, 257, 512, 513])
def test_a_t6_tokens_and_topk(tokens: int, topk: int, seed: int) -> None:
    case = _random_case(tokens, seed, topk=topk, missing=0.0)
    got = _execute(case, [tokens // 2, tokens - tokens // 2], **RING)
    _check(case, got)
    _assert_equal(got, _execute(case, [tokens]), "one rank")


@pytest.mark.parametrize(("experts", "topk"), [(127, 8), (128, 8), (129, 8), (256, 32)])
def test_a_t6_experts(experts: int, topk: int, seed: int) -> None:
    """Up to all experts of a rank and all routes of a token that are allowed."""
    case = _random_case(60, seed, experts=experts, topk=topk, hidden=64, inner=64)
    got = _execute(case, [60])
    _check(case, got)
    _assert_equal(_execute(case, [60], minibatch=128, macrobatch=128 * 5), got, "ring")


def test_256_local_experts_on_two_ranks(seed: int) -> None:
    case = _random_case(90, seed, experts=512, topk=32, hidden=64, inner=64)
    got = _execute(case, [31, 59])
    _check(case, got)
