"""Doctor and run give the same answer to one command line: the run through Megatron's own parser, where this Megatron has one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mok_megatron import doctor
from mok_megatron.megatron import apply_mok_to_megatron, compat, settings
from tests.megatron.test_support import GOOD, REFUSALS

training_arguments = compat.find_module("megatron.training.arguments")
pytestmark = pytest.mark.skipif(training_arguments is None, reason="this megatron-core has no megatron.training")

GRAPHS = [
    f"{implementation} {names}"
    for implementation in ("--cuda-graph-impl local", "--cuda-graph-impl transformer_engine", "--enable-cuda-graph", "--external-cuda-graph")
    for names in ("--cuda-graph-scope attn moe_router", "--cuda-graph-scope moe", "--cuda-graph-scope full", "--cuda-graph-modules attn", "")
]
OWN = [
    "--moe-backend wrong",
    "--mok-minibatch-size 100",
    "--mok-minibatch-size 256 --mok-macrobatch-size 384",
    "--mok-minibatch 128",
    "--mok-timeout-seconds 1e15",
    "--mok-timeout-seconds 60",
    "--mok-max-tokens-per-rank 0",
    "--mok-config nowhere.yaml",
    "--mok-log-expert-load",
]
NUMBERS = [f"--{name} {value}" for name in ("num-experts", "expert-model-parallel-size", "moe-latent-size") for value in ("x", "8 16", "1e2")]


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(settings.BACKEND_VARIABLE, raising=False)
    apply_mok_to_megatron()


def run_takes(monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> bool:
    model = "--num-layers 1 --num-attention-heads 4 --max-position-embeddings 64 --seq-length 64 --micro-batch-size 1 --moe-backend mok"
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *model.split(), *flags])
    try:
        training_arguments.parse_args()
    except SystemExit as end:
        assert end.code == 2
        return False
    return True


def doctor_takes(flags: list[str]) -> bool:
    verdicts = doctor.judge(["pretrain_gpt.py", *flags, "--no-gradient-accumulation-fusion"])
    return all(verdict["verdict"] != "refused" for verdict in verdicts)


@pytest.mark.parametrize("added", ["", *GRAPHS, *OWN, *NUMBERS, *(refusal[0] for refusal in REFUSALS)])
def test_doctor_and_run_agree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, added: str) -> None:
    monkeypatch.chdir(tmp_path)
    flags = [*GOOD.split(), *added.replace("--squared-relu", "--num-experts 8").split()]
    assert doctor_takes(flags) == run_takes(monkeypatch, flags)


@pytest.mark.parametrize("names", ["--cuda-graph-scope attn moe_router", "--cuda-graph-modules attn moe_router"])
def test_graphs_that_leave_the_experts_out_are_taken(monkeypatch: pytest.MonkeyPatch, names: str) -> None:
    assert run_takes(monkeypatch, [*GOOD.split(), *f"--cuda-graph-impl transformer_engine {names}".split()])
