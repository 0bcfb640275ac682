"""The benchmark's command line, shapes and workloads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mok_megatron.bench import command
from mok_megatron.bench.phases import PHASES
from mok_megatron.bench.rows import COMPETITORS
from mok_megatron.bench.settings import BenchSettings
from mok_megatron.bench.shapes import CONFIG_FOLDER, config_names, load_shape
from mok_megatron.bench.workloads import WORKLOADS, expert_ids, rank_tokens
from mok_megatron.config import MoKConfig
from mok_megatron.errors import MoKArgumentError

_SMALL = ["layer", "--device", "cpu", "--iterations", "2", "--warmup", "0"]


def test_run_at_ep_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "folder"
    arguments = ["--tokens", "20", "--workload", "uniform", "hot_rank", "--knob", "minibatch_size=256", "--out", str(out)]
    assert command.main([*_SMALL, *arguments]) == 0
    found = json.loads((out / "layer.json").read_text())
    assert [record["workload"] for record in found["records"]] == ["uniform", "hot_rank"]
    assert found["iterations"] == 2 and found["environment"]["torch"] == torch.__version__ and found["environment"]["package"]["version"]
    for record in found["records"]:
        assert record["config"]["minibatch_size"] == 256 and record["tokens_per_gpu"] == 20 and record["ep"] == 1
        rows = {row["name"]: row for row in record["rows"] if row["phase"] == "forward"}
        assert {name for name, row in rows.items() if row["status"] == "ok"} == {"mok", "mok_context", "nccl", "bare", "mok_schedule"}
        for phase in ("forward+backward", "backward"):
            rows_of = {row["name"]: row for row in record["rows"] if row["phase"] == phase}
            assert set(rows_of) == {"mok", "mok_bf16grad", "nccl", "bare"} and all(row["status"] == "ok" for row in rows_of.values())
            assert all(len(row["samples_ms"]) == 2 and row["ratio_to_bare"] and row["host_us"] for row in rows_of.values())
        assert record["main_grad"]["milliseconds"] > 0 and record["copy_bytes_per_second"] > 0
        assert record["memory"]["context_bytes"] == record["memory"]["promised_context_bytes"]
        assert len(rows["mok"]["samples_ms"]) == 2 and rows["mok"]["error"] <= rows["mok"]["tolerance"] and rows["mok"]["ratio_to_bare"]
        assert rows["sonicmoe"]["reason"] == "not installed (sonicmoe)"
    assert (out / "layer.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "skipped: not installed (deep_ep)" in printed and "of uniform on hot_rank" in printed and "layer.png" in printed


def test_run_at_ep_2_starts_its_own_processes(tmp_path: Path) -> None:
    assert command.main([*_SMALL, "--ep", "2", "--rows", "mok", "nccl", "bare", "--workload", "ragged", "--out", str(tmp_path)]) == 0
    (record,) = json.loads((tmp_path / "layer.json").read_text())["records"]
    assert record["ep"] == 2 and set(record["exposed_communication_us"]) == set(PHASES) and record["schedule_share"] > 0
    assert all(row["status"] == "ok" for row in record["rows"]), record["rows"]
    assert {row["name"] for row in record["rows"] if row["phase"] == "backward"} == {"mok", "nccl", "bare", "mok_ep1"}
    rows = {row["name"]: row for row in record["rows"] if row["phase"] == "forward"}
    assert set(rows) == {"mok", "nccl", "bare", "mok_schedule", "mok_ep1"}
    assert rows["mok"]["remote_bytes"] > 0 and rows["mok_ep1"]["remote_bytes"] == 0


def test_a_replay_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert set(COMPETITORS) - set(BenchSettings().rows) == {"mok_replay"}
    with pytest.raises(SystemExit):
        command.main(["layer", "--help"])
    assert "mok_replay" in capsys.readouterr().out
    arguments = ["--rows", "mok", "mok_replay", "--phases", "backward", "--knob", "minibatch_size=128", "--out", str(tmp_path)]
    assert command.main([*_SMALL, *arguments]) == 0
    (record,) = json.loads((tmp_path / "layer.json").read_text())["records"]
    assert {row["name"]: row["status"] for row in record["rows"]} == dict.fromkeys(("mok", "mok_replay", "mok_repeated"), "ok")
    assert record["replay"]["replayed_rows"] > 0 and "replay: the backward takes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["--device", "tpu"], ["device='tpu'", "must be cuda or cpu"]),
        (["--ep", "3"], ["ep=3", "must be one of 1, 2, 4, 8"]),
        (["--device", "cuda", "--ep", "8"], ["ep=8", "must be at most", "the number of GPUs"]),
        (["--shapes", "qwen9"], ["shapes='qwen9'", "must be one of qwen3-30b"]),
        (["--workload", "zipf_2"], ["workload='zipf_2'", "must be one of balanced, uniform"]),
        (["--rows", "mok", "te"], ["rows='te'", "must be one of mok, mok_bf16grad, mok_context"]),
        (["--phases", "forwards"], ["phases='forwards'", "must be one of forward, forward+backward, backward"]),
        (["--tokens", "0"], ["--tokens", "'0'", "must be an integer of at least 1"]),
        (["--tokens", "many"], ["--tokens", "'many'", "must be an integer of at least 1"]),
        (["--iterations", "0"], ["--iterations", "'0'", "at least 1"]),
        (["--warmup", "-1"], ["--warmup", "'-1'", "at least 0"]),
        (["--knob", "minibatch_size"], ["knob='minibatch_size'", "must be NAME=VALUE"]),
        (["--knob", "minibatch_size=100"], ["minibatch_size=100", "multiple of 128"]),
        (["--knob", "turbo=1"], ["turbo=1", "no such knob"]),
        (["--out", __file__], ["out=", "must be a folder"]),
        (["--out", "/proc/nobody/can/write"], ["out=", "must be a folder that can be written"]),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], texts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if "cuda" in arguments and torch.cuda.device_count() >= 8:
        pytest.skip("this machine has eight GPUs")
    try:
        code = command.main([*_SMALL, *arguments])
    except SystemExit as error:
        code = error.code
    assert code == 2
    printed = capsys.readouterr().err
    assert all(text in printed for text in texts), printed


def test_ep_must_be_what_torchrun_started(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert command.main([*_SMALL, "--ep", "2"]) == 2
    assert "ep=2: must be 4, the number of processes" in capsys.readouterr().err


def test_shapes_are_the_models() -> None:
    wanted = {
        "qwen3-30b": (2048, 768, 8, 16),
        "qwen3-235b": (4096, 1536, 8, 16),
        "qwen3.5-397b": (4096, 1024, 10, 64),
        "glm-5.2": (6144, 2048, 8, 32),
        "kimi-k2": (7168, 2048, 8, 48),
        "deepseek-v4-pro": (7168, 3072, 6, 48),
    }
    assert set(config_names()) == set(wanted)
    for name, sizes in wanted.items():
        shape = load_shape(name)
        assert (shape.hidden_size, shape.intermediate_size, shape.topk, shape.experts_per_gpu) == sizes
        assert shape.config == MoKConfig.from_yaml(CONFIG_FOLDER / f"{name}.yaml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- 1", ["must hold a mapping"]),
        ("model: a\nhidden_size: 64", ["must have intermediate_size"]),
        ("model: a\nhidden_size: 100\nintermediate_size: 64\ntopk: 1\nexperts_per_gpu: 1", ["hidden_size=100", "multiple of 64"]),
        ("model: a\nhidden_size: 64\nintermediate_size: 64\ntopk: 33\nexperts_per_gpu: 1", ["topk=33", "between 1 and 32"]),
        ("model: a\nhidden_size: 64\nintermediate_size: 64\ntopk: 1\nexperts_per_gpu: 1\nexperts: 2", ["unknown keys ['experts']"]),
        ("model: a\nhidden_size: 64\nintermediate_size: 64\ntopk: 1\nexperts_per_gpu: 1\nmok: {sm_reserve: -1}", ["sm_reserve=-1"]),
    ],
)
def test_wrong_shape_files_are_named(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "shape.yaml"
    path.write_text(text)
    with pytest.raises(MoKArgumentError) as caught:
        load_shape(str(path))
    assert all(word in str(caught.value) for word in words), caught.value


def test_tuned_knobs_stay_under_knobs_of_the_command(tmp_path: Path) -> None:
    path = tmp_path / "shape.yaml"
    path.write_text(
        "model: a\nhidden_size: 64\nintermediate_size: 64\ntopk: 1\nexperts_per_gpu: 1\nmok: {minibatch_size: 256, fwd_num_comm_sms: 8}"
    )
    (shape,) = BenchSettings(device="cpu", shapes=(str(path),), knobs=("fwd_num_comm_sms=16",)).model_shapes()
    assert (shape.config.minibatch_size, shape.config.fwd_num_comm_sms) == (256, 16)


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_tables(name: str, seed: int) -> None:
    arguments = {"seed": seed, "num_tokens": 400, "num_experts": 32, "topk": 4}
    table = expert_ids(name, **arguments)
    assert table.shape == (400, 4) and table.dtype == torch.int32
    assert bool((table[:, 1:] > table[:, :-1]).all()) and int(table.min()) >= 0 and int(table.max()) < 32
    assert torch.equal(table, expert_ids(name, **arguments))
    cuts = rank_tokens(name, seed=seed, num_tokens=400, ep_size=2)
    assert sum(cuts) == 400 and (cuts == [200, 200] or name == "ragged")


def test_workloads_are_as_skewed_as_they_say(seed: int) -> None:
    share = {}
    for name in WORKLOADS:
        table = expert_ids(name, seed=seed, num_tokens=2000, num_experts=32, topk=4)
        counts = torch.bincount(table.flatten().long(), minlength=32)
        share[name] = float(counts.max() / counts.double().mean())
    assert share["balanced"] == 1.0
    assert 1.0 < share["uniform"] < 1.3 < share["zipf_0.5"] < share["zipf_1.0"] < share["zipf_1.5"]
    assert share["hot_expert"] == 8.0  # every token: T of 4 T / 32 on average
    with pytest.raises(MoKArgumentError, match=r"topk=5: must be between 1 and num_experts=4"):
        expert_ids("uniform", seed=0, num_tokens=3, num_experts=4, topk=5)
