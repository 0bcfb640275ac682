"""Command-line flags: backend, knobs, YAML, environment, and what a stock backend sets in Megatron's arguments."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from mok_megatron import MoKArgumentError, MoKConfig
from mok_megatron.megatron import settings, support
from mok_megatron.megatron.arguments import add_mok_arguments, knob_types

MEGATRON_FLAGS = {
    "moe_token_dispatcher_type": "allgather",
    "moe_flex_dispatcher_backend": "deepep",
    "num_experts": 8,
    "hidden_size": 64,
    "moe_ffn_hidden_size": 64,
    "swiglu": True,
    "add_bias_linear": False,
    "fp16": False,
}
MODEL = ["--num-experts", "8"]


def parser() -> ArgumentParser:
    made = ArgumentParser(allow_abbrev=False)
    for name, default in MEGATRON_FLAGS.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(default, bool):
            made.add_argument(flag, action="store_true", default=default)
        else:
            made.add_argument(flag, type=type(default), default=default)
    return add_mok_arguments(made)


def parse(*argv: str) -> Namespace:
    return parser().parse_args(list(argv))


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_chosen", settings._Chosen())
    monkeypatch.setattr(settings, "_kept", {})
    monkeypatch.delenv(settings.BACKEND_VARIABLE, raising=False)


def test_the_default_leaves_megatrons_flags_alone() -> None:
    args = parse("--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "hybridep")
    assert args.moe_backend == "megatron"
    assert (args.moe_token_dispatcher_type, args.moe_flex_dispatcher_backend) == ("flex", "hybridep")


@pytest.mark.parametrize(
    ("backend", "dispatcher", "flex"),
    [
        ("megatron", "allgather", "deepep"),
        ("alltoall", "alltoall", "deepep"),
        ("deepep", "flex", "deepep"),
        ("hybridep", "flex", "hybridep"),
        ("mok", "allgather", "deepep"),
    ],
)
def test_one_flag_sets_the_dispatcher_wherever_it_stands(backend: str, dispatcher: str, flex: str) -> None:
    for argv in (["--moe-backend", backend, *MODEL], [*MODEL, f"--moe-backend={backend}"]):
        args = parse(*argv)
        assert args.moe_backend == backend
        assert (args.moe_token_dispatcher_type, args.moe_flex_dispatcher_backend) == (dispatcher, flex)


def test_a_stock_backend_goes_before_the_dispatcher_flag() -> None:
    args = parse("--moe-backend", "alltoall", "--moe-token-dispatcher-type", "flex")
    assert args.moe_token_dispatcher_type == "alltoall"


def test_every_knob_has_a_flag_and_reaches_the_config() -> None:
    given = {
        "fwd_num_comm_sms": 3,
        "bwd_num_comm_sms": 0,
        "minibatch_size": 256,
        "macrobatch_size": 512,
        "schedule_capacity_multiplier": 0.5,
        "sm_reserve": 4,
        "timeout_seconds": 12.5,
    }
    assert set(given) == {f.name for f in fields(MoKConfig)} == set(knob_types())
    argv = [word for name, value in given.items() for word in ("--mok-" + name.replace("_", "-"), str(value))]
    run = settings.resolve(parse("--moe-backend", "mok", "--mok-max-tokens-per-rank", "99", *argv))
    assert run.config == MoKConfig(**given)
    assert run.backend == "mok"
    assert run.max_tokens_per_rank == 99
    assert not run.log_expert_load


def test_the_yaml_file_gives_knobs_and_single_flags_go_before_it(tmp_path: Path) -> None:
    path = tmp_path / "knobs.yaml"
    path.write_text("minibatch_size: 256\nsm_reserve: 2\n")
    run = settings.resolve(parse("--moe-backend", "mok", "--mok-config", str(path), "--mok-sm-reserve", "7"))
    assert run.config == MoKConfig(minibatch_size=256, sm_reserve=7)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--mok-minibatch-size", "100"], "minibatch_size"),
        (["--mok-schedule-capacity-multiplier", "1.5"], "schedule_capacity_multiplier"),
        (["--mok-max-tokens-per-rank", "0"], "--mok-max-tokens-per-rank is 0"),
        (["--mok-config", "/nowhere/knobs.yaml"], "/nowhere/knobs.yaml"),
        (["--fp16"], "--fp16"),
    ],
)
def test_a_bad_value_ends_the_program_with_a_short_text(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse("--moe-backend", "mok", *MODEL, *argv)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert text in error
    assert "usage:" not in error


@pytest.mark.parametrize("backend", ["alltoall", "hybridep", "megatron"])
def test_a_bad_knob_is_told_under_every_backend(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The A/B of one flag must not end at different places."""
    with pytest.raises(SystemExit) as end:
        parse("--moe-backend", backend, *MODEL, "--mok-minibatch-size", "100")
    assert end.value.code == 2
    assert "minibatch_size=100" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "text"), [(["--mok-bwd-num-comm-sms", "4"], "bwd_num_comm_sms=4: must be 0"), (["--mok-sm-reserve", "131"], "132 SMs")]
)
def test_a_knob_that_no_gpu_of_these_takes_ends_the_program(
    argv: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parse("--moe-backend", "mok", *MODEL, *argv)  # without a GPU they have no meaning
    monkeypatch.setattr(support, "num_sms", lambda: 132)
    with pytest.raises(SystemExit):
        parse("--moe-backend", "mok", *MODEL, *argv)
    assert text in capsys.readouterr().err


def test_refusals_are_mok_matters_only() -> None:
    assert parse("--fp16", *MODEL).fp16


def test_the_environment_selects_where_the_flag_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.BACKEND_VARIABLE, "alltoall")
    assert parse().moe_token_dispatcher_type == "alltoall"
    assert parse("--moe-backend", "megatron").moe_token_dispatcher_type == "allgather"
    assert settings.resolve(None).backend == "alltoall"
    # Arguments from a YAML file have no such attribute.
    assert settings.resolve(Namespace()).backend == "alltoall"
    monkeypatch.setenv(settings.BACKEND_VARIABLE, "cats")
    with pytest.raises(SystemExit):
        parse()
    with pytest.raises(MoKArgumentError, match="MOK_MOE_BACKEND is 'cats'"):
        settings.resolve(None)


def test_the_program_goes_before_flags_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.BACKEND_VARIABLE, "alltoall")
    args = Namespace(moe_backend="deepep", mok_minibatch_size=128)
    settings.choose("mok", MoKConfig(sm_reserve=1), 5, True)
    assert settings.resolve(args) == settings.RunSettings("mok", MoKConfig(sm_reserve=1), 5, True)
    settings.choose(None, None, None, None)
    assert settings.resolve(args).backend == "deepep"
    with pytest.raises(MoKArgumentError, match="backend is 'cats'"):
        settings.choose("cats", None, None, None)


def test_flags_beside_a_yaml_file_that_replaces_the_arguments_are_kept() -> None:
    """Megatron throws the parsed arguments away for those of --yaml-cfg; the backend that was typed must not go with them."""
    made = parser()
    made.add_argument("--yaml-cfg")
    made.parse_args(["--moe-backend", "mok", "--mok-minibatch-size", "256", "--yaml-cfg", "model.yaml"])
    run = settings.resolve(Namespace(hidden_size=64))
    assert run.backend == "mok" and run.config.minibatch_size == 256
    assert settings.resolve(Namespace(moe_backend="alltoall", mok_macrobatch_size=512)).backend == "mok"
    parse()
    assert settings.resolve(Namespace(hidden_size=64)).backend == "megatron"


def test_sms_are_left_to_collectives_that_run_beside_a_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def reserve(**flags: object) -> int:
        return settings.config_from_args(Namespace(**{"expert_model_parallel_size": 2, "overlap_grad_reduce": True, **flags})).sm_reserve

    assert reserve() == 0, "the CPU executor has no SMs"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert reserve() == settings.SM_RESERVE_BESIDE_COLLECTIVES > 0
    assert reserve(overlap_grad_reduce=False, overlap_param_gather=True) == settings.SM_RESERVE_BESIDE_COLLECTIVES
    assert reserve(overlap_grad_reduce=False) == reserve(expert_model_parallel_size=1) == reserve(mok_sm_reserve=0) == 0
    assert reserve(mok_sm_reserve=4) == 4
    file = tmp_path / "mok.yaml"
    file.write_text("timeout_seconds: 60\n")
    assert reserve(mok_config=str(file)) == 0, "a file says what the knobs are"
