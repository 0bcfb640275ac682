"""What a MoK layer refuses, on every rank; where its settings come from; what the run log says."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer

from mok_megatron import MoKArgumentError, MoKCapacityError, MoKConfig, MoKUnsupportedError
from mok_megatron.executors import cpu
from mok_megatron.megatron import compat, install, layer, microbatch, set_microbatch
from tests.distributed import RankPool
from tests.megatron import helpers
from tests.megatron.helpers import assert_same_numbers, build_layer, make_config, make_mok, run_layer, start_megatron, tokens


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
    compat.find_module("megatron.training.arguments")  # its own import needs the real global_vars
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


def test_a_restart_within_the_process_goes_on_after_a_fatal_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch.distributed no new group tells the restarted run from the one that failed."""
    start_megatron(1)
    layer._workspaces.clear()
    x, dy = tokens((9, 1, 64), 1), tokens((9, 1, 64), 2)

    def broken(*_: Any) -> None:
        raise MemoryError("no memory left for a tile")

    with monkeypatch.context() as patch:
        patch.setattr(cpu, "activation", broken)
        with pytest.raises(MemoryError):
            build_layer("mok", make_config())(x)
    (failed,) = layer._workspaces.values()
    assert failed.failure is not None
    restarted = build_layer("mok", make_config())
    assert_same_numbers(run_layer(restarted, x, dy), run_layer(build_layer("alltoall", make_config()), x, dy), helpers.FP32_TOLERANCE)
    (workspace,) = layer._workspaces.values()
    assert workspace is not failed and workspace.failure is None


def test_each_layer_keeps_its_backend() -> None:
    start_megatron(1)
    mok, stock = build_layer("mok", make_config()), build_layer("alltoall", make_config())
    assert type(stock) is MoELayer
    assert type(mok) is layer.MoKMoELayer and isinstance(mok, MoELayer)
    assert type(mok.token_dispatcher).__name__ == "MoKTokenDispatcher"


def test_the_stock_dispatcher_of_the_same_script_need_not_exist_here() -> None:
    """deep_ep is absent; an A/B script keeps its dispatcher flags under --moe-backend=mok."""
    start_megatron(1)
    config = make_config(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="hybridep", moe_router_dtype="fp32")
    x, dy = tokens((9, 1, 64), 1), tokens((9, 1, 64), 2)
    actual = run_layer(build_layer("mok", config), x, dy)
    assert config.moe_token_dispatcher_type == "flex"
    expected = run_layer(build_layer("alltoall", make_config(moe_router_dtype="fp32")), x, dy)
    assert_same_numbers(actual, expected, helpers.FP32_TOLERANCE)


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


def test_one_rank_of_a_pipeline_stage_speaks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A stage without MoE layers says nothing, so the first rank of all cannot speak for the run."""
    start_megatron(1)
    ranks = {"data": 0, "tensor": 0}
    monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda with_context_parallel: ranks["data"])
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: ranks["tensor"])
    for data, tensor, speaks in ((0, 0, True), (1, 0, False), (0, 1, False)):
        ranks.update(data=data, tensor=tensor)
        install.say("hello")
        assert ("hello" in capsys.readouterr().out) == speaks


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
