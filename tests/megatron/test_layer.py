"""A real Megatron MoE layer with MoK against the same layer with Megatron's AllToAll dispatcher."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from megatron.core import tensor_parallel

from mok_megatron import functional
from mok_megatron.megatron import layer
from tests.distributed import RankPool
from tests.megatron import helpers
from tests.megatron.helpers import assert_same_numbers, build_layer, make_config, make_mok, run_layer, start_megatron, tokens

BF16_TOLERANCE = 2.0**-5
"""A dozen bf16 roundings of 2^-8 in other places, of the largest element."""


def compare_backends(rank: int, ep_size: int, dtype: torch.dtype = torch.float32, sequence: int = 24, **changes: Any) -> None:
    """Output, dx and all gradients of both backends on this rank's tokens."""
    start_megatron(ep_size)
    config = make_config(ep_size, dtype, **changes)
    x = tokens((sequence, 2, config.hidden_size), 100 + rank, dtype)
    dy = tokens(x.shape, 200 + rank, dtype)
    expected = run_layer(build_layer("alltoall", config), x, dy)
    mok = build_layer("mok", config)
    assert isinstance(mok, layer.MoKMoELayer)
    actual = run_layer(mok, x, dy)
    assert_same_numbers(actual, expected, helpers.FP32_TOLERANCE if dtype == torch.float32 else BF16_TOLERANCE)


ROUTERS = {
    "aux_loss": {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01},
    "seq_aux_loss": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1},
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 1},
    "pre_softmax_top1": {"moe_router_pre_softmax": True, "moe_router_topk": 1},
    "sigmoid_bias_scaled": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_dtype": "fp32",
    },
    "groups": {
        "num_moe_experts": 8,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk": 3,
        "moe_router_score_function": "sigmoid",
    },
    "dropping": {"moe_expert_capacity_factor": 0.5},
    "fp64_router": {"moe_router_dtype": "fp64"},
}


@pytest.mark.parametrize("router", ROUTERS)
def test_any_router_equals_alltoall(router: str) -> None:
    compare_backends(0, 1, **ROUTERS[router])


def test_bf16_equals_alltoall() -> None:
    compare_backends(0, 1, torch.bfloat16)


@pytest.mark.parametrize("gated", [False, True])
def test_shared_expert(gated: bool) -> None:
    compare_backends(0, 1, moe_shared_expert_intermediate_size=96, moe_shared_expert_gate=gated)


@pytest.mark.parametrize("gated", [False, True])
def test_overlapped_shared_expert_is_driven(gated: bool) -> None:
    """Its output would be missing in silence from a dispatcher that ignores it."""
    compare_backends(0, 1, moe_shared_expert_intermediate_size=96, moe_shared_expert_gate=gated, moe_shared_expert_overlap=True)


def ranks_compare(rank: int) -> None:
    compare_backends(rank, 2, moe_aux_loss_coeff=0.1)
    compare_backends(rank, 2, torch.bfloat16, moe_shared_expert_intermediate_size=64, num_moe_experts=8)
    compare_backends(rank, 2, moe_expert_capacity_factor=0.5)


def test_two_ranks_equal_alltoall(ranks2: RankPool) -> None:
    ranks2.run(ranks_compare, timeout=120)


def ragged(rank: int) -> None:
    """Rank 1 with few tokens, then none: every parameter's hook fires on both ranks, nobody hangs."""
    start_megatron(2)
    config = make_config(2)
    stock, mok = build_layer("alltoall", config), build_layer("mok", config, max_tokens_per_rank=9)
    fired: list[str] = []
    for name, parameter in mok.experts.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(name))
    x, dy = tokens(((9, 1)[rank], 1, 64), rank), tokens(((9, 1)[rank], 1, 64), 9 + rank)
    actual = run_layer(mok, x, dy)
    assert sorted(fired) == sorted(name for name, _ in mok.experts.named_parameters())
    assert_same_numbers(actual, run_layer(stock, x, dy), helpers.FP32_TOLERANCE)

    # Megatron's own router cannot take 0 tokens; what comes after it can. All routes go to rank 0's experts.
    number = (5, 0)[rank]
    fired.clear()
    mok.zero_grad(set_to_none=True)
    x, dy = x[:number].clone().requires_grad_(True), dy[:number]
    probs = torch.full((number, 4), 0.5, requires_grad=True)
    routing_map = torch.tensor([True, True, False, False]).expand(number, 4)
    hidden, weights = mok.preprocess(x, probs, routing_map)
    output = mok.postprocess(mok.combine(mok.routed_experts_compute(*mok.dispatch(hidden, weights))[0]), None)
    assert output.shape == x.shape
    output.backward(dy)
    assert sorted(fired) == sorted(name for name, _ in mok.experts.named_parameters())
    assert x.grad.shape == x.shape and probs.grad.shape == probs.shape
    for name, parameter in mok.experts.named_parameters():
        assert bool((parameter.grad != 0).any()) == (rank == 0), name


def test_ragged_and_empty_ranks(ranks2: RankPool) -> None:
    """A-T1, A-T3 through the layer."""
    ranks2.run(ragged, timeout=120)


def test_several_microbatches_in_flight() -> None:
    mok = make_mok(num_moe_experts=8)
    batches = [(tokens((11, 1, 64), i), tokens((11, 1, 64), 50 + i)) for i in range(3)]
    alone = [run_layer(mok, x, dy) for x, dy in batches]
    mok.zero_grad(set_to_none=True)
    inputs = [x.clone().requires_grad_(True) for x, _ in batches]
    outputs = [mok(x)[0] for x in inputs]
    for i in (1, 0, 2):
        outputs[i].backward(batches[i][1])
    for i in range(3):
        assert torch.equal(outputs[i], alone[i]["y"])
        assert torch.equal(inputs[i].grad, alone[i]["dx"])
    summed = {name: sum(run[name] for run in alone) for name in alone[0]}
    assert_same_numbers(helpers.named_gradients(mok), {n: summed[n] for n in summed if n not in ("y", "dx")}, 1e-6)


def test_a_layer_that_is_entered_twice_in_one_forward() -> None:
    mok, stock = make_mok(), build_layer("alltoall", make_config())

    def twice(built: Any) -> dict[str, torch.Tensor]:
        built.zero_grad(set_to_none=True)
        x = tokens((9, 1, 64), 1).requires_grad_(True)
        y = built(built(x)[0])[0]
        y.backward(tokens(y.shape, 2))
        return {"y": y.detach(), "dx": x.grad, **helpers.named_gradients(built)}

    assert_same_numbers(twice(mok), twice(stock), 4 * helpers.FP32_TOLERANCE)


@pytest.mark.parametrize("full", [False, True])
def test_recomputation_gives_the_same_bits(full: bool, contexts: list[Any]) -> None:
    x, dy = tokens((13, 2, 64), 3), tokens((13, 2, 64), 4)
    plain = run_layer(make_mok(moe_aux_loss_coeff=0.1), x, dy)
    changes = {} if full else {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    mok = make_mok(moe_aux_loss_coeff=0.1, **changes)
    assert mok.moe_layer_recompute is not full
    contexts.clear()
    if full:
        leaf = x.clone().requires_grad_(True)
        y = tensor_parallel.checkpoint(lambda t: mok(t)[0], False, leaf)
        y.backward(dy)
        again = {"y": y.detach(), "dx": leaf.grad, **helpers.named_gradients(mok)}
    else:
        again = run_layer(mok, x, dy)
    assert [c is not None for c in contexts] == [False, True], "the first pass keeps nothing"
    for name, value in plain.items():
        assert torch.equal(value, again[name]), name


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The context of each forward of the core from now on, None where none is kept."""
    kept: list[Any] = []
    original = functional.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        y, context = original(*args, **kwargs)
        kept.append(context)
        return y, context

    monkeypatch.setattr(functional, "forward", forward)
    return kept


def test_evaluation_runs_mok_and_stores_nothing(contexts: list[Any]) -> None:
    mok = make_mok()
    x = tokens((10, 1, 64), 5)
    expected = mok(x)[0].detach()
    mok.eval()
    contexts.clear()
    with torch.no_grad():
        y, _ = mok(x)
    assert contexts == [None]
    assert not y.requires_grad
    assert torch.equal(y, expected)
    assert type(mok.token_dispatcher).__name__ == "MoKTokenDispatcher"


def test_what_a_call_keeps_is_freed_with_its_graph(contexts: list[Any]) -> None:
    mok = make_mok()
    y, _ = mok(tokens((10, 1, 64), 5).requires_grad_(True))
    rows = weakref.ref(contexts.pop().x_rows)
    gc.collect()
    assert rows() is not None
    y.sum().backward()
    del y
    gc.collect()
    assert rows() is None


def test_everything_saved_goes_through_saved_tensor_hooks(contexts: list[Any]) -> None:
    mok = make_mok()
    packed: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor.clone()

    x, dy = tokens((10, 1, 64), 5), tokens((10, 1, 64), 6)
    plain = run_layer(mok, x, dy)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        hooked = run_layer(mok, x, dy)
    rows = contexts[-1].x_rows.shape[0]
    assert torch.Size((rows, 64)) in packed and torch.Size((rows, 256)) in packed
    assert torch.Size((256, 64)) not in packed, "weights are not saved"
    for name, value in plain.items():
        assert torch.equal(value, hooked[name]), name


def test_padding_tokens_have_no_routes() -> None:
    """A-T5 (iii) and (iv): 64 tokens, 48 valid, top-2; expert bias counts only valid tokens; pad rows give 0."""
    mok = make_mok(
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_dtype="fp32",
        moe_aux_loss_coeff=0.1,
    )
    x = tokens((32, 2, 64), 7)
    mask = torch.zeros(2, 32, dtype=torch.bool)  # [batch, sequence], True = padding
    mask[1, 16:] = True
    schedules: list[Any] = []
    original = functional.build_schedule
    try:
        functional.build_schedule = lambda *a, **k: schedules.append(original(*a, **k)) or schedules[-1]
        y, _ = mok(x.clone().requires_grad_(True), padding_mask=mask)
    finally:
        functional.build_schedule = original
    assert int(schedules[0].expert_rows.sum()) == 96
    padding = mask.transpose(0, 1)
    assert torch.equal(y[padding], torch.zeros_like(y[padding]))
    assert bool((y[~padding] != 0).any(dim=1).all())
    assert int(mok.router.local_tokens_per_expert.sum()) == 96
    # The mask is of one call.
    y, _ = mok(x)
    assert bool((y != 0).any(dim=2).all())


def test_a_mask_is_of_one_call() -> None:
    """Where the router is in a CUDA graph, its hook does not run at replay, and the last mask must not come back."""
    mok = make_mok()
    routing_map = torch.tensor([True, False, True, False]).expand(6, 4)
    mok.token_dispatcher.mark_padding(torch.arange(6) >= 4)
    empty = []
    for _ in range(2):
        mok.token_dispatcher.dispatch_preprocess(tokens((6, 1, 64), 1), routing_map, routing_map.float())
        topk_experts, _ = mok.token_dispatcher.take_routes()
        empty.append(int((topk_experts == -1).sum()))
    assert empty == [4, 0]


def padded_ranks(rank: int) -> int:
    start_megatron(4)
    mok = build_layer("mok", make_config(4))
    mask = torch.zeros(1, 64, dtype=torch.bool)
    mask[0, 48:] = True
    counts: list[int] = []
    original = functional.build_schedule
    try:

        def build_schedule(*args: Any, **kwargs: Any) -> Any:
            schedule = original(*args, **kwargs)
            counts.append(int(schedule.expert_rows.sum()))
            return schedule

        functional.build_schedule = build_schedule
        mok(tokens((64, 1, 64), rank), padding_mask=mask)
    finally:
        functional.build_schedule = original
    return counts[0]


def test_padding_at_four_ranks(ranks4: RankPool) -> None:
    """A-T5 (iii): 4 ranks with 48 valid tokens of 64, top-2: 384 routes."""
    assert sum(ranks4.run(padded_ranks, timeout=120)) == 384


def test_frozen_experts_get_no_gradient_and_the_others_keep_theirs() -> None:
    mok = make_mok()
    x, dy = tokens((12, 1, 64), 8), tokens((12, 1, 64), 9)
    plain = run_layer(mok, x, dy)
    frozen = [p for n, p in mok.named_parameters() if "local_experts.1." in n or n.endswith("0.linear_fc2.weight")]
    assert len(frozen) == 3
    for parameter in frozen:
        parameter.requires_grad_(False)
        parameter.main_grad = torch.full_like(parameter, 7.0)  # frozen after the wrapper had made it
    mok.zero_grad(set_to_none=True)
    leaf = x.clone().requires_grad_(True)
    mok(leaf)[0].backward(dy)
    assert torch.equal(leaf.grad, plain["dx"])
    for name, parameter in mok.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None
            assert torch.equal(parameter.main_grad, torch.full_like(parameter, 7.0))
        else:
            assert torch.equal(parameter.grad, plain[name]), name


def test_the_phases_of_a_partial_cuda_graph() -> None:
    """Megatron runs router, experts and postprocessing one by one and carries the dispatcher's tensors between them."""
    mok = make_mok()
    x = tokens((10, 1, 64), 5)
    expected, _ = mok(x)
    phases = mok.fwd_execution_map
    try:
        mok.fwd_execution_map = "route"
        hidden, weights, shared = mok(x, intermediate_tensors=())
        carried = {name: getattr(mok.token_dispatcher, name).clone() for name in mok.token_dispatcher.cudagraph_attrs}
        mok.token_dispatcher.topk_experts = None
        for name, tensor in carried.items():
            setattr(mok.token_dispatcher, name, tensor)
        mok.fwd_execution_map = "expert_compute"
        output, _ = mok(None, intermediate_tensors=(hidden, weights))
        mok.fwd_execution_map = "postprocess"
        y = mok(None, intermediate_tensors=(output, shared))
    finally:
        mok.fwd_execution_map = phases
    assert torch.equal(y, expected)
