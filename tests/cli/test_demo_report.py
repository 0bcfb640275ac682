"""The demo's verdict and report, on runs made by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mok_megatron.demo import report, runner
from mok_megatron.demo.settings import DemoSettings
from mok_megatron.errors import MoKArgumentError


def runs(mok: list[float], allgather: float = 0.01, one_ulp: float = 0.02, mok_layer: str = "MoKMoELayer") -> dict[str, Any]:
    """Four runs of three steps; AllToAll's losses are 3, 2, 1 and the floor runs are off by a constant in step 2."""

    def run(name: str, backend: str, losses: list[float], layer: str, dispatcher: str) -> dict[str, Any]:
        return {
            "name": name,
            "backend": backend,
            "layers": [{"number": n, "class": layer, "dispatcher": dispatcher, "is_mok": "MoK" in layer} for n in (1, 2)],
            "losses": losses,
            "gradient_norms": [1.0] * 3,
            "seconds_per_step": [9.0, 9.0, 0.25],
            "tokens_per_expert": [[10, 0, 6, 0], [4, 4, 4, 4]],
        }

    return {
        "alltoall": run("alltoall", "megatron", [3.0, 2.0, 1.0], "MoELayer", "MoEAlltoAllTokenDispatcher"),
        "allgather": run("allgather", "megatron", [3.0, 2.0 + allgather, 1.0], "MoELayer", "MoEAllGatherTokenDispatcher"),
        "alltoall_one_ulp": run("alltoall_one_ulp", "megatron", [3.0, 2.0 - one_ulp, 1.0], "MoELayer", "MoEAlltoAllTokenDispatcher"),
        "mok": run("mok", "mok", mok, mok_layer, "MoKTokenDispatcher"),
    }


def summary(**changes: Any) -> dict[str, Any]:
    settings = {**DemoSettings(steps=3).to_dict(), "num_experts": 4}
    return report.summarise(settings, {"executor": "CPU executor", "executor_reason": "no NVIDIA GPU found"}, runs(**changes))


@pytest.mark.parametrize(
    ("changes", "floor"), [({}, 0.02), ({"allgather": 0.05}, 0.05), ({"one_ulp": 0.5}, 0.5)], ids=["ulp", "allgather", "larger-ulp"]
)
def test_verdict_turns_at_four_times_the_larger_floor(changes: dict[str, float], floor: float) -> None:
    inside = summary(mok=[3.0, 2.0, 1.0 + 3.99 * floor], **changes)
    assert inside["floor"] == pytest.approx(floor)
    assert inside["passed"] and inside["failures"] == []
    outside = summary(mok=[3.0, 2.0, 1.0 - 4.01 * floor], **changes)
    assert not outside["passed"]
    assert "more than 4 times the floor" in outside["failures"][0]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_losses_that_are_not_finite_fail(loss: float) -> None:
    answer = summary(mok=[3.0, loss, 1.0])
    assert not answer["passed"] and "run mok: a loss is not finite" in answer["failures"]


def test_a_mok_run_that_stock_layers_computed_fails() -> None:
    answer = summary(mok=[3.0, 2.0, 1.0], mok_layer="MoELayer")
    assert not answer["passed"]
    assert answer["failures"][0] == "run mok, layer 1: asked for mok, MoELayer ran"


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's runner with a training that takes no time and has MoK agree."""

    def train(settings: DemoSettings, device: str, scratch: str) -> None:
        Path(scratch, "runs.json").write_text(json.dumps(runs(mok=[3.0, 2.01, 1.0])))

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the runner sets it
    monkeypatch.setattr(runner, "_require_packages", lambda: None)
    monkeypatch.setattr(runner, "_machine", lambda: {"executor": "CPU executor", "executor_reason": "no NVIDIA GPU found"})
    monkeypatch.setattr(runner, "_train", train)


@pytest.mark.usefixtures("trained")
def test_a_report_that_cannot_be_written_is_printed_and_is_no_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = DemoSettings(out=tmp_path / "out", steps=3, num_experts=4)
    assert runner.run_demo(settings) == runner.EXIT_AGREES
    capsys.readouterr()

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report, "_plot", full)
    assert runner.run_demo(settings) == runner.EXIT_FAILED
    out, err = capsys.readouterr()
    assert "**MoK agrees with AllToAll.**" in out and "written:" not in out
    assert "No space left on device" in err


@pytest.mark.usefixtures("trained")
def test_nothing_is_trained_for_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(runner, "_train", lambda *args: pytest.fail("trained"))
    with pytest.raises(MoKArgumentError, match="must be a folder that can be made and written to"):
        runner.run_demo(DemoSettings(out=tmp_path / "file"))


def test_report_files(tmp_path: Path) -> None:
    answer = summary(mok=[3.0, 2.01, 1.0])
    markdown, json_file, png = report.write(answer, tmp_path)
    assert json.loads(json_file.read_text()) == answer
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 10_000
    text = markdown.read_text()
    assert "**MoK agrees with AllToAll.**" in text
    assert "| MoK to AllToAll | 1.000e-02 |" in text
    assert "| mok | mok | `MoKMoELayer` with `MoKTokenDispatcher` | 3.0000 | 1.0000 | 250 ms |" in text
    assert "| mok | 1 | 10 | 0 | 6 | 0 | 2.50 |" in text
    assert "MoK ran on the CPU executor: no NVIDIA GPU found." in text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_inputs_move_by_exactly_one_unit_in_the_last_place(dtype: torch.dtype) -> None:
    pytest.importorskip("megatron.core", reason="the demo's model is Megatron's")
    from mok_megatron.demo.model import move_inputs_by_one_ulp

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.word_embeddings = torch.nn.Embedding(64, 8, dtype=dtype)

    model = Model()
    weight = model.word_embeddings.weight
    weight.data[0] = 0
    before = weight.detach().clone()
    move_inputs_by_one_ulp(model, seed=3)  # type: ignore[arg-type]
    up = torch.nextafter(before, torch.full_like(before, math.inf))
    down = torch.nextafter(before, torch.full_like(before, -math.inf))
    zero = before == 0  # not in the first row alone: normal numbers drawn in bf16 are coarse
    assert (weight[zero] == 0).all()
    moved_up, moved_down = (weight == up)[~zero], (weight == down)[~zero]
    assert (moved_up ^ moved_down).all()
    assert 0.3 < moved_up.double().mean() < 0.7
