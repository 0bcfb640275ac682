"""A real Megatron MoE layer with MoK against the same layer with Megatron's AllToAll dispatcher."""

from __future__ import annotations

import gc
import sys
import weakref
from argparse import Namespace
from typing import Any

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.moe_layer import MoELayer

from mok_megatron import MoKArgumentError, MoKCapacityError, MoKConfig, MoKUnsupportedError, functional
from mok_megatron.megatron import install, layer, microbatch, set_microbatch
from tests.distributed import RankPool
from tests.megatron import helpers
from tests.megatron.helpers import assert_same_numbers, build_layer, make_config, run_layer, start_megatron, tokens

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


def make_mok(**changes: Any) -> Any:
    start_megatron(1)
    return build_layer("mok", make_config(**changes))


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
    mok.zero_grad(set_to_none=True)
    leaf = x.clone().requires_grad_(True)
    mok(leaf)[0].backward(dy)
    assert torch.equal(leaf.grad, plain["dx"])
    for name, parameter in mok.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None
        else:
            assert torch.equal(parameter.grad, plain[name]), name


def overfull(rank: int) -> str:
    start_megatron(2)
    mok = build_layer("mok", make_config(2))
    x = tokens((4, 1, 64), rank)
    real = mok.router.forward

    def route(*args: Any, **kwargs: Any) -> Any:
        probs, routing_map = real(*args, **kwargs)
        if rank == 1:
            routing_map = routing_map.clone()
            routing_map[2] = True
        return probs, routing_map

    mok.router.forward = route
    try:
        mok(x)
        return "no error"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    mok.router.forward = real
    assert bool(mok(x)[0].isfinite().all()), "the process is usable afterwards"
    return text


def test_a_row_with_more_than_k_routes_is_refused_on_every_rank(ranks2: RankPool) -> None:
    peer, own = ranks2.run(overfull, timeout=120)
    assert own.startswith("MoKArgumentError") and "token 2 has 4 routes" in own and "K = 2" in own and "layer 1" in own
    assert peer.startswith("MoKPeerError") and "rank 1" in peer


def too_many_tokens(rank: int) -> str:
    start_megatron(2)
    mok = build_layer("mok", make_config(2), max_tokens_per_rank=64)
    mok(tokens((64, 1, 64), rank))
    try:
        mok(tokens(((64, 640)[rank], 1, 64), rank))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_more_tokens_than_agreed_are_refused_on_every_rank(ranks2: RankPool) -> None:
    """A-T3, last line."""
    peer, own = ranks2.run(too_many_tokens, timeout=120)
    assert "640 tokens" in own and "--mok-max-tokens-per-rank" in own
    assert "640 tokens" in peer


def test_the_workspace_is_sized_from_megatrons_arguments() -> None:
    args = Namespace(seq_length=4096, micro_batch_size=2, context_parallel_size=2, tensor_model_parallel_size=4)
    assert layer.tokens_per_rank(args) == 4096
    args.sequence_parallel = True
    assert layer.tokens_per_rank(args) == 1024
    args.eval_micro_batch_size = 3
    assert layer.tokens_per_rank(args) == 1536
    args.max_seqlen_per_dp_cp_rank = 8192
    assert layer.tokens_per_rank(args) == 8192
    assert layer.tokens_per_rank(None) is None
    assert layer.tokens_per_rank(Namespace()) is None


def test_megatrons_arguments_reach_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    start_megatron(1)
    args = Namespace(moe_backend="mok", mok_minibatch_size=128, seq_length=48, micro_batch_size=2, num_experts=4, fp16=False)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", Namespace(get_args=lambda: args))
    mok = build_layer(None, make_config())
    assert mok._mok_settings.config.minibatch_size == 128
    layer._workspaces.clear()
    mok(tokens((5, 1, 64), 1))
    (workspace,) = layer._workspaces.values()
    assert (workspace.num_local_tokens, workspace.minibatch_size) == (96, 128)
    args.fp16 = True
    with pytest.raises(MoKUnsupportedError, match="--fp16"):
        build_layer(None, make_config())
    args.moe_backend = "megatron"
    assert type(build_layer(None, make_config())) is MoELayer


def test_layers_share_one_workspace() -> None:
    start_megatron(1)
    layer._workspaces.clear()
    first, second = (build_layer("mok", make_config(), layer_number=i, max_tokens_per_rank=77) for i in (1, 2))
    first(tokens((5, 1, 64), 1))
    second(tokens((7, 1, 64), 1))
    assert [w.num_local_tokens for w in layer._workspaces.values()] == [77]


def test_each_layer_keeps_its_backend() -> None:
    start_megatron(1)
    mok, stock = build_layer("mok", make_config()), build_layer("alltoall", make_config())
    assert type(stock) is MoELayer
    assert type(mok) is layer.MoKMoELayer and isinstance(mok, MoELayer)
    assert type(mok.token_dispatcher).__name__ == "MoKTokenDispatcher"


def test_a_class_of_its_own_is_refused() -> None:
    start_megatron(1)

    class TheirLayer(MoELayer):
        pass

    with helpers.chosen_backend("mok"), pytest.raises(MoKUnsupportedError, match="TheirLayer is a class of its own"):
        TheirLayer(config=make_config(), submodules=None)


def test_a_config_that_is_refused_is_refused_before_the_layer_is_built() -> None:
    start_megatron(1)
    with pytest.raises(MoKUnsupportedError, match="--moe-ffn-hidden-size"):
        build_layer("mok", make_config(moe_ffn_hidden_size=100))
    build_layer("alltoall", make_config(moe_ffn_hidden_size=100))


def test_the_run_log_says_once_which_backend_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """E-T5."""
    start_megatron(1)
    install._announced.clear()
    for _ in range(2):
        build_layer("mok", make_config())
    said = [line for line in capsys.readouterr().out.splitlines() if "MoE backend" in line]
    assert len(said) == 1 and "mok_megatron: MoE backend: mok" in said[0] and "timeout_seconds=30" in said[0]
    build_layer("megatron", make_config(moe_token_dispatcher_type="allgather"))
    build_layer("alltoall", make_config(moe_token_dispatcher_type="allgather"))
    said = capsys.readouterr().out.splitlines()
    assert "megatron with the allgather dispatcher (as Megatron's flags say)" in said[0]
    assert "megatron with the alltoall dispatcher (set by --moe-backend=alltoall)" in said[1]


def test_microbatch_numbers_of_passes_that_run_again() -> None:
    memory = microbatch.MicrobatchMemory()
    try:
        for number in range(3):
            set_microbatch(number)
            assert memory.of_forward(training=True, saves=False, in_backward=False) == number
        assert [memory.of_forward(training=True, saves=True, in_backward=True) for _ in range(3)] == [0, 1, 2]
        set_microbatch(5)
        assert memory.of_forward(training=True, saves=True, in_backward=False) == 5
        assert memory.of_forward(training=False, saves=False, in_backward=False) == 5
        assert memory.of_forward(training=True, saves=True, in_backward=True) == 5
    finally:
        set_microbatch(None)


def test_capacity_errors_reach_the_user() -> None:
    start_megatron(1)
    mok = build_layer("mok", make_config(), knobs=MoKConfig(schedule_capacity_multiplier=0.05))
    with pytest.raises(MoKCapacityError) as error:
        mok(tokens((512, 1, 64), 1))
    assert error.value.needed_rows > error.value.available_rows


def test_one_rank_alone_may_bring_more_tokens_later() -> None:
    mok = make_mok()
    x, dy = tokens((200, 1, 64), 1), tokens((200, 1, 64), 2)
    early = mok(x[:9].clone().requires_grad_(True))[0]
    grown = run_layer(mok, x, dy)
    early.sum().backward()  # its context belongs to the smaller workspace
    assert_same_numbers(grown, run_layer(build_layer("alltoall", make_config()), x, dy), helpers.FP32_TOLERANCE)


def test_wrong_dtype_is_an_argument_error() -> None:
    mok = make_mok()
    mok.router.to(torch.bfloat16)
    with pytest.raises(MoKArgumentError, match="dtype"):
        mok(tokens((4, 1, 64), 1, torch.bfloat16))
