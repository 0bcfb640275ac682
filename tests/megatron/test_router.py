"""Routes from the routing map: slots, weights and their gradient (A-T4 last line, A-T5 i and ii)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mok_megatron.errors import MoKArgumentError
from mok_megatron.megatron import router_kernels
from mok_megatron.megatron.router import compact_routes, describe_overfull_rows, gather_router_weights


def expected_routes(routing_map: torch.Tensor, topk: int) -> list[list[int]]:
    rows = [row.nonzero().flatten().tolist() for row in routing_map]
    return [row + [-1] * (topk - len(row)) for row in rows]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 9), st.integers(1, 12), st.integers(1, 8), st.integers(0, 2**31))
def test_slots_are_the_experts_in_ascending_order_then_minus_one(tokens: int, experts: int, topk: int, seed: int) -> None:
    topk = min(topk, experts)
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator)
    kept = torch.randint(0, topk + 1, (tokens, 1), generator=generator)
    routing_map = scores.argsort(dim=1).argsort(dim=1) < kept
    ids = compact_routes(routing_map, topk)
    assert ids.dtype == torch.int32
    assert ids.tolist() == expected_routes(routing_map, topk)
    assert torch.equal(ids, compact_routes(routing_map.long(), topk))
    assert describe_overfull_rows(routing_map, topk) is None


def test_a_row_with_too_many_routes_becomes_an_id_that_no_group_has() -> None:
    routing_map = torch.zeros(4, 5, dtype=torch.bool)
    routing_map[0, [1, 4]] = True
    routing_map[2, [0, 1, 3]] = True
    ids = compact_routes(routing_map, 2)
    assert ids[0].tolist() == [1, 4]
    assert ids[2, 0] == 5
    text = describe_overfull_rows(routing_map, 2)
    assert text is not None and "token 2 has 3 routes" in text and "K = 2" in text


def test_a_chosen_expert_with_probability_zero_keeps_its_slot_and_its_gradient() -> None:
    """A-T5 (i)."""
    probs = torch.tensor([[0.0, 0.6, 0.4]], requires_grad=True)
    routing_map = torch.tensor([[True, True, False]])
    weights = gather_router_weights(probs, compact_routes(routing_map, 2))
    assert weights.tolist() == [[0.0, pytest.approx(0.6)]]
    weights.backward(torch.tensor([[2.0, 3.0]]))
    assert probs.grad.tolist() == [[2.0, 3.0, 0.0]]


def test_a_probability_without_a_route_is_ignored() -> None:
    """A-T5 (ii): the map decides."""
    probs = torch.tensor([[0.7, 0.2, 0.1]], requires_grad=True)
    ids = compact_routes(torch.tensor([[False, True, False]]), 2)
    assert ids.tolist() == [[1, -1]]
    weights = gather_router_weights(probs, ids)
    assert weights.tolist() == [[pytest.approx(0.2), 0.0]]
    weights.backward(torch.tensor([[1.0, 5.0]]))
    assert probs.grad.tolist() == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_weights_are_fp32_and_the_gradient_has_the_probabilities_dtype(dtype: torch.dtype) -> None:
    probs = torch.tensor([[0.25, 0.75], [float("nan"), 0.5]], dtype=dtype, requires_grad=True)
    weights = gather_router_weights(probs, torch.tensor([[0, 1], [1, -1]], dtype=torch.int32))
    assert weights.dtype == torch.float32
    assert weights.tolist() == [[0.25, 0.75], [0.5, 0.0]]
    weights.sum().backward()
    assert probs.grad.dtype == dtype
    assert probs.grad.tolist() == [[1.0, 1.0], [0.0, 1.0]]


@pytest.mark.parametrize(
    ("probs", "routing_map", "topk", "said"),
    [
        (torch.rand(3, 8), torch.ones(3, 9, dtype=torch.bool), 2, r"probs: shape \[3, 8\] must be \[T, E\], that of routing_map, \[3, 9\]"),
        (torch.rand(3), torch.ones(3, dtype=torch.bool), 2, r"probs: shape \[3\] must be \[T, E\]"),
        (torch.ones(3, 8, dtype=torch.int32), torch.ones(3, 8, dtype=torch.bool), 2, "probs: dtype torch.int32 must be one of torch.float32"),
        (torch.rand(3, 8), torch.ones(3, 8), 2, "routing_map: dtype torch.float32 on cpu must be torch.bool on cpu"),
        (torch.rand(3, 64), torch.ones(3, 64, dtype=torch.bool), 33, "moe_router_topk=33: must be between 1 and 32"),
    ],
)
def test_what_the_kernels_cannot_read_is_refused(probs: torch.Tensor, routing_map: torch.Tensor, topk: int, said: str) -> None:
    with pytest.raises(MoKArgumentError, match=said):
        router_kernels.routes_and_weights(probs, routing_map, topk)


class Operators(TorchDispatchMode):
    """Names of the operators that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_backward_runs_no_operator_beside_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the kernels, whose addresses alone count here: a gradient of the ids, zeros, would be a launch of its own."""
    launches = []
    monkeypatch.setattr(router_kernels, "kernel_library", lambda: SimpleNamespace(mok_sm90_compact_routes="c", mok_sm90_spread_gradients="s"))
    monkeypatch.setattr(router_kernels, "_launch", lambda function, device, *words: launches.append(function))
    probs = torch.rand(5, 9, requires_grad=True)
    _, weights = router_kernels.routes_and_weights(probs, torch.rand(5, 9) < 0.3, 3)
    grad = torch.rand_like(weights)
    with Operators() as operators:
        torch.autograd.grad(weights, probs, grad)
    assert launches == ["c", "s"]
    assert [name for name in operators.names if "empty" not in name and "detach" not in name] == []
