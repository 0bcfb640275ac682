"""``mok-megatron doctor``: what it finds and what it says to a command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mok_megatron import doctor, foreign_flags
from mok_megatron.megatron import compat
from tests.cli.conftest import ROOT, Result, write_tree

Mok = Callable[..., Result]

GOOD = [
    "--", "torchrun", "--nproc-per-node", "2", "pretrain_gpt.py", "--num-experts", "8", "--moe-router-topk", "2", "--hidden-size", "256",
    "--moe-ffn-hidden-size", "128", "--swiglu", "--disable-bias-linear", "--bf16", "--no-gradient-accumulation-fusion",
    "--expert-model-parallel-size", "2",
]  # fmt: skip

NO_DRIVER = """
import atexit, ctypes, importlib.machinery, os, sys

find_spec = importlib.machinery.PathFinder.find_spec

class Hide(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in BLOCKED else find_spec(name, path, target)

open_library = ctypes.CDLL.__init__
def refuse_driver(self, name, *args, **kwargs):
    if name and "libcuda.so" in str(name):
        raise OSError(f"{name}: cannot open shared object file (blocked)")
    open_library(self, name, *args, **kwargs)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Hide
ctypes.CDLL.__init__ = refuse_driver

def check_at_exit():
    torch = sys.modules.get("torch")
    initialised = torch is not None and torch.cuda.is_initialized()
    mapped = "libcuda.so" in open("/proc/self/maps").read()
    if initialised or mapped:
        os.write(2, f"CUDA was touched: initialised {initialised}, libcuda mapped {mapped}".encode())
        os._exit(77)

atexit.register(check_at_exit)
"""


def no_driver(tmp_path: Path, blocked: tuple[str, ...] = ("transformer_engine", "apex", "amp_C", "deep_ep")) -> Path:
    return write_tree(tmp_path / "no_driver", {"sitecustomize.py": f"BLOCKED = {blocked!r}\n{NO_DRIVER}"})


@pytest.mark.parametrize(
    "arguments",
    [
        ["-m", "mok_megatron.cli", "--help"],
        ["-m", "mok_megatron.cli", "demo", "--help"],
        ["-m", "mok_megatron.cli", "doctor"],
        ["-m", "mok_megatron.cli", "doctor", *GOOD],
    ],
    ids=["help", "demo-help", "doctor", "doctor-command"],
)
def test_e_t1_works_without_driver_te_and_apex(tmp_path: Path, arguments: list[str]) -> None:
    done = run_python(arguments, no_driver(tmp_path))
    assert done.returncode == 0, done.stderr


def test_e_t1_the_check_itself_finds_an_initialised_cuda(tmp_path: Path) -> None:
    pretend = "import torch; torch.cuda.is_initialized = lambda: True"
    assert run_python(["-c", pretend], no_driver(tmp_path)).returncode == 77
    site = no_driver(tmp_path)
    write_tree(site, {"apex/__init__.py": ""})
    assert run_python(["-c", "import apex"], site).returncode == 1
    assert run_python(["-c", "import ctypes; ctypes.CDLL('libcuda.so.1')"], no_driver(tmp_path)).returncode == 1


def run_python(arguments: list[str], site: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": f"{site}:{ROOT}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=120)


def test_e_t1_doctor_survives_packages_that_cannot_be_imported(tmp_path: Path, mok: Mok) -> None:
    broken = "raise OSError('libcuda.so.1: cannot open shared object file')\n"
    site = write_tree(tmp_path / "broken", {f"{name}/__init__.py": broken for name in ("transformer_engine", "apex", "deep_ep")})
    result = mok("doctor", path=(site,))
    assert result.code == 0, result
    assert "Transformer Engine: present" in result.out


def test_e_t2_unrelated_apex_is_told_apart(tmp_path: Path, mok: Mok) -> None:
    site = write_tree(tmp_path / "web", {"apex/__init__.py": "", "apex/models.py": "", "apex/forms/__init__.py": ""})
    result = mok("doctor", path=(site,))
    assert "another project that shares the name, not NVIDIA's APEX" in result.out, result
    assert str(site) in result.out
    assert_gives_build_route(result.out)
    assert result.code == 0  # MoK itself does not need APEX


def test_e_t2_fusion_is_refused_with_that_text(tmp_path: Path, mok: Mok) -> None:
    site = write_tree(tmp_path / "web", {"apex/__init__.py": ""})
    with_fusion = [word for word in GOOD if word != "--no-gradient-accumulation-fusion"]
    result = mok("doctor", "--json", *with_fusion, path=(site, no_driver(tmp_path, blocked=("transformer_engine",))))
    (refusal,) = [flag for flag in json.loads(result.out)["flags"] if flag["verdict"] == "refused"]
    assert refusal["flag"] == "--gradient-accumulation-fusion"
    assert "another project that shares the name" in refusal["reason"]
    assert_gives_build_route(refusal["reason"])
    assert result.code == 1


def test_e_t2_nvidia_apex_without_its_extensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {f"apex/{name}/__init__.py": "" for name in ("multi_tensor_apply", "optimizers", "normalization")}
    monkeypatch.syspath_prepend(write_tree(tmp_path / "nv", {"apex/__init__.py": "", **packages}))
    finding = doctor.find_apex()
    assert "NVIDIA's" in finding.value and "built without amp_C, fused_weight_gradient_mlp_cuda" in finding.value
    assert_gives_build_route(finding.advice)

    write_tree(tmp_path / "nv", {"amp_C.py": "", "fused_weight_gradient_mlp_cuda.py": ""})
    assert doctor.find_apex().state == doctor.OK


def assert_gives_build_route(text: str) -> None:
    assert "https://github.com/NVIDIA/apex" in text and "--no-build-isolation ." in text
    assert "pip install apex" not in text


REFUSED = {
    "ep-3": (["--expert-model-parallel-size", "3"], "--expert-model-parallel-size", "multiple of the expert-parallel size"),
    "ep-16": (["--expert-model-parallel-size", "16", "--num-experts", "64"], "--expert-model-parallel-size", "NVLink domain"),
    "hidden-100": (["--hidden-size", "100"], "--hidden-size", "multiple of 64"),
    "fp16": (["--fp16"], "--fp16", "use --bf16"),
    "nvfp4": (["--fp4-format", "e2m1"], "--fp4-format", "NVFP4"),
    "minibatch-100": (["--mok-minibatch-size", "100"], "--mok-minibatch-size", "must be >= 128 and a multiple of 128"),
    "knob-unknown": (["--mok-minibatch", "128"], "--mok-minibatch", "no such flag"),
    "lora": (["--lora-rank", "8"], "--lora-rank", "LoRA"),
    "backend-unknown": (["--moe-backend", "wrong"], "--moe-backend", "invalid choice: 'wrong'"),
    "experts-text": (["--num-experts", "abc"], "--num-experts", "one integer"),
    "experts-two": (["--num-experts", "8", "16"], "--num-experts", "one integer"),
    "experts-none": (["--num-experts"], "--num-experts", "one integer"),
    "experts-empty": (["--num-experts="], "--num-experts", "one integer"),
    "experts-real": (["--num-experts", "1e2"], "--num-experts", "one integer"),
    "experts-negative": (["--num-experts", "-8"], "--num-experts", "at least 0"),
    "hidden-text": (["--hidden-size", "none"], "--hidden-size", "one integer"),
    "ffn-real": (["--ffn-hidden-size", "128.5"], "--ffn-hidden-size", "one integer"),
    "ep-text": (["--expert-model-parallel-size", "two"], "--expert-model-parallel-size", "one integer"),
    "ep-0": (["--expert-model-parallel-size", "0"], "--expert-model-parallel-size", "at least 1"),
    "topk-text": (["--moe-router-topk", "x"], "--moe-router-topk", "one integer"),
    "latent-text": (["--moe-latent-size", "x"], "--moe-latent-size", "one integer"),
    "tp-text": (["--tensor-model-parallel-size", "x"], "--tensor-model-parallel-size", "one integer"),
    "chunks-text": (["--mlp-chunks-for-training", "x"], "--mlp-chunks-for-training", "one integer"),
    "knob-text": (["--mok-minibatch-size", "none"], "--mok-minibatch-size", "invalid int value: 'none'"),
    "knob-two": (["--mok-minibatch-size", "128", "256"], "--mok-minibatch-size", "expected one argument|one value"),
    "knob-no-value": (["--mok-config"], "--mok-config", "expected one argument"),
    "config-missing": (["--mok-config", "3"], "--mok-config", "No such file"),
    "tokens-0": (["--mok-max-tokens-per-rank", "0"], "--mok-max-tokens-per-rank", "at least 1"),
    "switch-value": (["--mok-log-expert-load", "3"], "--mok-log-expert-load", "ignored explicit argument '3'"),
    "knobs-together": (
        ["--mok-minibatch-size", "256", "--mok-macrobatch-size", "384"],
        "--mok-minibatch-size=256 --mok-macrobatch-size=384",
        "multiple of minibatch_size=256",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_f_t5_refusal_names_flag_and_rule(mok: Mok, name: str) -> None:
    added, flag, rule = REFUSED[name]
    result = mok("doctor", "--json", *GOOD, *added)
    assert "Traceback" not in result.err
    refused = [verdict for verdict in json.loads(result.out)["flags"] if verdict["verdict"] == "refused"]
    assert [verdict["flag"] for verdict in refused] == [flag]
    assert re.search(rule, refused[0]["reason"])
    assert result.code == 1


def test_a_refused_group_is_not_called_supported_as_well() -> None:
    flags = doctor.judge(["pretrain_gpt.py", "--num-experts", "64", "--expert-model-parallel-size", "16"])
    assert [flag["verdict"] for flag in flags if flag["flag"] == "--expert-model-parallel-size"] == ["refused"]


HAS_PARSER = compat.find_module("megatron.training.arguments") is not None
with_parser = pytest.mark.skipif(not HAS_PARSER, reason="this megatron-core has no parser")
MISTYPED = {"--moe-bakend=mok": "--moe-backend", "--swigl": "--swiglu", "--num-expert=9": "--num-experts", "--num_experts=8": "--num-experts"}


def verdicts_on(*command: str) -> dict[str, tuple[str, str]]:
    return {verdict["flag"]: (verdict["verdict"], verdict["reason"]) for verdict in doctor.judge(command)}


@pytest.mark.parametrize("before", [[], ["pretrain_gpt.py"]])
def test_a_flag_that_megatron_does_not_have_is_not_called_transparent(before: list[str]) -> None:
    found = verdicts_on(*before, *GOOD[5:], *MISTYPED, "--typo-x")
    for word, meant in [*MISTYPED.items(), ("--typo-x", "")]:
        verdict, reason = found[word.split("=")[0]]
        assert verdict == ("refused" if HAS_PARSER else "unknown")
        assert ("Megatron has no such flag" if HAS_PARSER else "unknown to this Megatron-Core and to MoK; not judged") in reason
        assert reason.endswith(f"; is {meant} meant?") if meant else "meant" not in reason
    assert found["--num-experts"][0] == "supported"


def test_exit_code_and_last_line_of_a_mistyped_flag(mok: Mok) -> None:
    result = mok("doctor", *GOOD, "--moe-bakend=mok")
    assert result.code == (1 if HAS_PARSER else 0), result
    assert result.out.splitlines()[-1].startswith("MoK cannot be used" if HAS_PARSER else "MoK can be used; not judged: --moe-bakend")


@with_parser
def test_every_flag_of_megatrons_parser_is_let_through() -> None:
    from argparse import ArgumentParser

    from megatron.training.arguments import add_megatron_arguments

    flags = [flag for flag in add_megatron_arguments(ArgumentParser())._option_string_actions if flag.startswith("--")]
    assert len(flags) > 400
    found = doctor.judge(["pretrain_gpt.py", *flags])
    assert [verdict for verdict in found if "no such flag" in verdict["reason"] or verdict["verdict"] == "unknown"] == []


def test_fields_of_megatron_cores_configs_are_known_without_its_parser() -> None:
    found = verdicts_on(*GOOD[1:], "--lr", "1e-4", "--num-layers", "2", "--no-bias-dropout-fusion")
    assert {found[flag] for flag in ("--lr", "--num-layers", "--no-bias-dropout-fusion")} == {("transparent", "outside of the routed experts")}


SCRIPT = """
from megatron.training import pretrain
from my_flags import add_flags
pretrain(None, extra_args_provider=add_flags)
"""
FLAGS = """
from dataclasses import dataclass
from .more import add_more
@dataclass
class Settings:
    window_of_mine: int = 3
def add_flags(parser):
    parser.add_argument("--flag-of-mine")
    for name in ("a", "b"):
        parser.add_argument(f"--vision-{name}")
"""


def test_flags_that_a_script_adds_are_found_in_its_source(tmp_path: Path) -> None:
    more = "def add_more(parser):\n    parser.add_argument('--more')\n"
    site = write_tree(tmp_path, {"train.py": SCRIPT, "my_flags/__init__.py": FLAGS, "my_flags/more.py": more})
    added = ["--flag-of-mine", "--vision-a", "--window-of-mine", "--more"]
    found = verdicts_on("torchrun", str(site / "train.py"), *GOOD[5:], *added, "--flag-of-mime", "3")
    for flag in added:
        assert found[flag][0] == "unknown" and "train.py seems to add it" in found[flag][1]
    assert found["--flag-of-mime"][0] == ("refused" if HAS_PARSER else "unknown")


@pytest.mark.parametrize(
    "script",
    [
        "import argparse\nargparse.ArgumentParser()\n",
        "from megatron.training import get_args\n",
        "from megatron.training.arguments import parse_args\nparse_args(ignore_unknown_args=True)\n",
        "import sys\nfrom megatron.training import pretrain\nsys.argv = sys.argv[:1]\n",
        "this is no Python",
    ],
)
def test_a_script_that_may_take_any_flag_gets_no_refusal(tmp_path: Path, script: str) -> None:
    path = write_tree(tmp_path, {"train.py": script}) / "train.py"
    assert verdicts_on(str(path), *GOOD[5:], "--typo-x")["--typo-x"][0] == "unknown"


@pytest.mark.parametrize("before", [["train.py"], ["torchrun", "-m", "train"], ["pretrain_gpt.py", "--export-quant-cfg=x"]])
def test_a_script_that_cannot_be_read_gets_no_refusal(before: list[str]) -> None:
    flags = GOOD[5:] if before[0] == "pretrain_gpt.py" else [*GOOD[5:], "--flag-of-mine"]
    found = verdicts_on(*before, *flags)
    assert "refused" not in {verdict for verdict, _ in found.values()}
    assert [verdict for verdict, _ in found.values()].count("unknown") == 1


def test_a_megatron_that_cannot_be_imported_refuses_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_tree(tmp_path, {"sitecustomize.py": "import sys; sys.modules['megatron'] = None"})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    foreign_flags.megatron_flags.cache_clear()
    try:
        assert verdicts_on(*GOOD[1:], "--lr", "3")["--lr"][0] == "unknown"
    finally:
        foreign_flags.megatron_flags.cache_clear()


def test_a_command_line_without_its_dashes_is_told_how(mok: Mok) -> None:
    result = mok("doctor", "pretrain_gpt.py", "--swiglu")
    assert result.code == 2
    assert result.err.splitlines()[-1].endswith("unrecognized arguments: --swiglu; a command line goes behind --")
    assert "behind" not in mok("demo", "--swiglu").err


def test_knobs_that_do_not_go_together_are_not_called_supported() -> None:
    found = verdicts_on(*GOOD[1:], "--mok-minibatch-size", "256", "--mok-macrobatch-size", "384")
    assert [flag for flag in found if flag.startswith("--mok")] == ["--mok-minibatch-size=256 --mok-macrobatch-size=384"]


def test_two_reasons_against_a_flag_stand_in_one_line() -> None:
    lines = [
        v
        for v in doctor.judge(["pretrain_gpt.py", *GOOD[5:], "--expert-model-parallel-size", "9"])
        if v["flag"] == "--expert-model-parallel-size"
    ]
    (line,) = lines
    assert "at most 8 ranks" in line["reason"] and "a multiple of the expert-parallel size" in line["reason"]


def test_a_model_without_experts_is_told(mok: Mok) -> None:
    bare = ["doctor", "--", "pretrain_gpt.py", "--no-gradient-accumulation-fusion"]
    assert "no MoE layer" in mok(*bare).out
    assert "no MoE layer" not in mok(*bare, "--num-experts=8").out


def test_the_refusal_shows_the_value_that_was_given(mok: Mok) -> None:
    for added in (["--num-experts", "abc"], ["--moe-backend", "wrong"], ["--mok-minibatch-size", "100"]):
        assert re.search(rf"refused +{' '.join(added)}: .*(integer|choice|multiple of 128)", mok("doctor", *GOOD, *added).out)


def test_a_backend_of_the_environment_is_judged_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOK_MOE_BACKEND", "wrong")
    (refusal,) = [verdict for verdict in doctor.judge(GOOD[1:]) if verdict["verdict"] == "refused"]
    assert refusal["flag"] == "MOK_MOE_BACKEND" and "'wrong'" in refusal["reason"]
    assert all(verdict["verdict"] != "refused" for verdict in doctor.judge([*GOOD[1:], "--moe-backend=mok"]))


def test_a_config_file_is_judged_with_the_knobs_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "knobs.yaml"
    path.write_bytes(b"\xff\xfe")
    (refusal,) = [verdict for verdict in doctor.judge([*GOOD[1:], "--mok-config", str(path)]) if verdict["verdict"] == "refused"]
    assert refusal["flag"] == "--mok-config" and "cannot be read" in refusal["reason"]
    path.write_text("mok:\n  macrobatch_size: 384\n")
    for size, refusals in ((128, 0), (256, 1)):
        found = doctor.judge([*GOOD[1:], "--mok-config", str(path), "--mok-minibatch-size", str(size)])
        assert sum(verdict["verdict"] == "refused" for verdict in found) == refusals


def test_f_t5_supported_command_line(mok: Mok) -> None:
    result = mok("doctor", *GOOD)
    assert result.code == 0, result
    for promised in ("expert-parallel sizes: 1 to 8", "hidden size: a multiple of 64", "precision: BF16, on the CPU", "links: "):
        assert promised in result.out
    assert "supported --num-experts 8" in result.out
    assert "refused " not in result.out
    assert "--nproc-per-node" not in result.out  # the launcher's flags are not Megatron's


def test_unbuilt_library_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("mok_megatron.build.BUILD_INFO", tmp_path / "none.json")
    answer = doctor.diagnose([])
    (finding,) = [f for f in answer["findings"] if f["subject"] == "mok_megatron"]
    assert finding["state"] == doctor.PROBLEM and "not built" in finding["value"]
    assert not answer["healthy"]


SMI = """#!/bin/sh
case "$*" in
  *driver_version*) echo 580.1; echo 580.1;;
  *compute_cap*) echo "0, NVIDIA H200, 9.0, 143771 MiB"; echo "1, NVIDIA H200, 9.0, 143771 MiB";;
  topo*) printf '\\tGPU0\\tGPU1\\tCPU Affinity\\nGPU0 X LINK 0-15\\nGPU1 LINK X 0-15\\n';;
esac
"""


@pytest.mark.parametrize(("link", "said"), [("NV18", "NV18 between all pairs"), ("SYS", "SYS between all pairs: no NVLink")])
def test_gpus_and_links_are_read_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str, said: str) -> None:
    program = write_tree(tmp_path, {"nvidia-smi": SMI.replace("LINK", link)}) / "nvidia-smi"
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    findings = {finding.subject: finding for finding in doctor.examine()}
    assert findings["CUDA driver"].value == "580.1"
    assert findings["GPUs"].value == "0: NVIDIA H200 (sm_90); 1: NVIDIA H200 (sm_90)"
    assert findings["links"].value == said


def test_a_command_line_is_refused_where_a_gpu_without_kernels_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the run itself refuses it."""
    monkeypatch.setattr("mok_megatron.build.build_info", lambda: {"archs": ["90a"]})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def refusals(capability: str) -> list[str]:
        monkeypatch.setattr(doctor, "find_gpus", lambda: [{"index": "0", "name": "a GPU", "compute_capability": capability}])
        return [v["reason"] for v in doctor.judge(["train.py", "--num-experts", "8"]) if v["flag"] == "--moe-backend"]

    assert refusals("9.0") == []
    (reason,) = refusals("10.0")
    assert "built for sm_90a" in reason and "compute capability 10.0" in reason
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert refusals("10.0") == []
