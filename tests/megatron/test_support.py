"""The feature table: every refusal has a test that reads its text (F-T5), and every row applies to something."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from mok_megatron import MoKBuildError, MoKUnsupportedError, build
from mok_megatron.megatron import support
from mok_megatron.megatron.feature_table import FEATURES, INTEGERS

GOOD = (
    "--num-experts 8 --moe-router-topk 2 --hidden-size 256 --moe-ffn-hidden-size 128 --swiglu --disable-bias-linear --bf16 "
    "--expert-model-parallel-size 2"
)

REFUSALS: list[tuple[str, str, str]] = [
    # added to GOOD, the flag that the refusal names, words of the reason
    ("--hidden-size 100", "--hidden-size", "multiple of 64"),
    ("--moe-latent-size 100", "--moe-latent-size", "multiple of 64"),
    ("--moe-ffn-hidden-size 100", "--moe-ffn-hidden-size", "multiple of 64"),
    ("--expert-model-parallel-size 16 --num-experts 32", "--expert-model-parallel-size", "at most 8 ranks"),
    ("--expert-model-parallel-size 3", "--expert-model-parallel-size", "multiple of the expert-parallel size"),
    ("--num-experts 1024", "--num-experts", "at most 256 experts"),
    ("--moe-router-topk 33 --num-experts 64", "--moe-router-topk", "at most 32 routes"),
    ("--expert-tensor-parallel-size 2", "--expert-tensor-parallel-size", "whole on one rank"),
    ("--tensor-model-parallel-size 2", "--expert-tensor-parallel-size", "whole on one rank"),
    (
        "--expert-tensor-parallel-num-weight-shards 2",
        "--expert-tensor-parallel-num-weight-shards",
        "gathered for each use",
    ),
    ("--moe-single-grouped-weight", "--moe-single-grouped-weight", "GroupedTensor"),
    ("--moe-single-grouped-bias", "--moe-single-grouped-bias", "biases"),
    ("--squared-relu", "--swiglu", "SwiGLU and no other activation"),
    ("--activation-func-clamp-value 7", "--activation-func-clamp-value", "clamped"),
    ("--glu-linear-offset 1.0", "--glu-linear-offset", "offset"),
    ("--use-te-activation-func", "--use-te-activation-func", "inside the kernels"),
    ("--moe-mlp-glu-interleave-size 32", "--moe-mlp-glu-interleave-size", "not interleaved"),
    ("--add-bias-linear", "--add-bias-linear", "--disable-bias-linear"),
    ("--moe-apply-probs-on-input", "--moe-apply-probs-on-input", "multiplies the activation"),
    ("--moe-pad-expert-input-to-capacity", "--moe-pad-expert-input-to-capacity", "more than K routes"),
    (
        "--moe-expert-rank-capacity-factor 1.5",
        "--moe-expert-rank-capacity-factor",
        "--mok-schedule-capacity-multiplier",
    ),
    ("--moe-dispatch-fwd-dtype mxfp8", "--moe-dispatch-fwd-dtype", "BF16"),
    ("--moe-combine-bwd-dtype mxfp8", "--moe-combine-bwd-dtype", "BF16"),
    ("--overlap-moe-expert-parallel-comm", "--overlap-moe-expert-parallel-comm", "one by one"),
    ("--ep-overlap-early-attn-memory-release", "--ep-overlap-early-attn-memory-release", "belongs to"),
    ("--delay-wgrad-compute", "--delay-wgrad-compute", "one backward kernel"),
    (
        "--overlap-dispatch-backward-with-experts-wgrad",
        "--overlap-dispatch-backward-with-experts-wgrad",
        "one backward kernel",
    ),
    ("--moe-paged-stash", "--moe-paged-stash", "stashed"),
    (
        "--fine-grained-activation-offloading --offload-modules attn_norm moe_act",
        "--offload-modules",
        "do not exist as separate activations",
    ),
    ("--cuda-graph-impl full_iteration --cuda-graph-modules attn", "--cuda-graph-impl", "full_iteration"),
    ("--cuda-graph-impl transformer_engine --cuda-graph-scope moe", "--cuda-graph-impl", "contains the experts"),
    ("--cuda-graph-impl local", "--cuda-graph-impl", "no scope"),
    ("--use-torch-fsdp2", "--use-torch-fsdp2", "--use-megatron-fsdp"),
    ("--fp16", "--fp16", "no FP16"),
    ("--fp8-format hybrid --fp8-recipe mxfp8", "--fp8-format", "MXFP8 is not supported yet"),
    ("--fp8-param-gather", "--fp8-param-gather", "quantised expert weights"),
    ("--fp4-format e2m1", "--fp4-format", "NVFP4"),
    ("--te-precision-config-file x.yaml", "--te-precision-config-file", "single modules"),
    ("--batch-invariant-mode", "--batch-invariant-mode", "stock kernels"),
    ("--use-kitchen", "--use-kitchen", "linear layers"),
    ("--modelopt-enabled", "--modelopt-enabled", "linear layers"),
    ("--export-te-mcore-model", "--export-te-mcore-model", "linear layers"),
    ("--lora-rank 16", "--lora-rank", "LoRA"),
    ("--transformer-impl inference_optimized", "--transformer-impl", "inference_optimized"),
]


def merged(added: str) -> list[str]:
    """GOOD with flags of ``added`` in place of its own (the last one of a name wins)."""
    return f"{GOOD} {added}".split()


def refusals(argv: list[str]) -> dict[str, str]:
    return {v.flag: v.reason for v in support.check_arguments(argv) if v.verdict == "refused"}


def test_a_good_command_line_is_not_refused() -> None:
    assert refusals(GOOD.split()) == {}


@pytest.mark.parametrize(("added", "flag", "words"), REFUSALS, ids=[r[0].split("--")[1].strip() for r in REFUSALS])
def test_refusal(added: str, flag: str, words: str) -> None:
    found = refusals(merged(added.replace("--squared-relu", "--swiglu=false --squared-relu")))
    assert flag in found
    assert words in found[flag]
    assert len(found) == 1
    with pytest.raises(MoKUnsupportedError) as error:
        support.require_supported(merged(added.replace("--squared-relu", "--swiglu=false --squared-relu")))
    assert flag in str(error.value) and words in str(error.value)


def test_expandable_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments:True")
    assert refusals(GOOD.split()) == {}, "no GPU, no allocator"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "symmetric memory" in refusals(GOOD.split())["PYTORCH_ALLOC_CONF"]


def test_every_refusing_row_has_a_test() -> None:
    tested = {(flag, words) for _, flag, words in REFUSALS} | {("PYTORCH_ALLOC_CONF", "symmetric memory")}
    tested |= {("--bf16", "compute in BF16"), ("--moe-use-legacy-grouped-gemm", "no transposed weights")}  # on a GPU, below
    rows = {(f.flag, f.reason) for f in FEATURES if f.verdict == "refused"}
    untested = [row for row in rows if not any(row[0] == flag and words in row[1] for flag, words in tested)]
    assert untested == []


@pytest.mark.parametrize("feature", [f for f in FEATURES if f.verdict != "refused" and f.flag != "--swiglu"], ids=lambda f: f.flag)
def test_every_other_row_applies_to_its_flag(feature: Any) -> None:
    value = {
        "--cuda-graph-impl": "local --cuda-graph-modules moe_router",
        "--cuda-graph-modules": "moe_router --cuda-graph-impl local",
        "--cuda-graph-scope": "attn --cuda-graph-impl local",
        "--expert-model-parallel-size": "4",
        "--moe-latent-size": "64",
    }.get(feature.flag, "3")
    found = support.check_arguments(merged(f"{feature.flag} {value}"))
    assert (feature.flag, feature.verdict, feature.reason) in {(v.flag, v.verdict, v.reason) for v in found}
    assert feature.reason


def test_no_value_of_any_flag_breaks_the_table() -> None:
    flags = {f.flag for f in FEATURES if f.flag.startswith("--")} | {"--" + name.replace("_", "-") for name in INTEGERS}
    flags |= {"--ffn-hidden-size", "--cuda-graph-scope", "--cuda-graph-modules", "--fine-grained-activation-offloading"}
    for flag in flags:
        for value in ("", "x", "8 16", "a b", "1.5", "-3", "none", "true", "1e999", "[1,2]"):
            found = support.check_arguments(merged(f"{flag} {value}"))
            assert all(v.reason for v in found)


@pytest.mark.parametrize("name", INTEGERS)
def test_a_number_that_is_none_is_refused_and_shown(name: str) -> None:
    flag = "--" + name.replace("_", "-")
    for text, value, rule in (("x", "x", "one integer"), ("8 16", [8, 16], "one integer"), ("-1", -1, f"at least {INTEGERS[name]}")):
        found = [v for v in support.check_arguments(merged(f"{flag} {text}")) if v.flag == flag and v.verdict == "refused"]
        assert [(v.value, rule in v.reason) for v in found] == [(value, True)]
    with pytest.raises(MoKUnsupportedError, match=rf"{flag} \(is x\): must be one integer"):
        support.require_supported(Namespace(**{name: "x"}))  # of a YAML file
    support.require_supported(Namespace(**{name: None}))


def test_what_the_table_does_not_name_is_outside_of_the_experts() -> None:
    (verdict,) = [v for v in support.check_arguments(merged("--lr 1e-4")) if v.flag == "--lr"]
    assert (verdict.verdict, verdict.value) == ("transparent", 1e-4)
    assert "outside" in verdict.reason


@pytest.mark.parametrize(
    ("added", "flag"),
    [
        ("--moe-router-topk 40", "--moe-router-topk"),
        ("--expert-model-parallel-size 3", "--expert-model-parallel-size"),
        ("--num-experts 1024", "--num-experts"),
        ("--moe-latent-size 100", "--moe-latent-size"),
        ("--cuda-graph-impl local --cuda-graph-scope moe", "--cuda-graph-impl"),
        ("--cuda-graph-impl full_iteration --cuda-graph-modules attn", "--cuda-graph-impl"),
    ],
)
def test_what_is_refused_is_said_nothing_else_of(added: str, flag: str) -> None:
    found = [(v.flag, v.verdict) for v in support.check_arguments(merged(added))]
    about = {flag, *(word for word in added.split() if word.startswith("--"))}
    assert [pair for pair in found if pair[0] in about] == [(flag, "refused")]


def test_a_refused_default_is_told_in_place_of_the_flag_it_comes_from() -> None:
    line = "--num-experts 8 --swiglu --disable-bias-linear --hidden-size 256 --ffn-hidden-size 100"
    found = [(v.flag, v.value, v.verdict) for v in support.check_arguments(line.split()) if v.flag.endswith("ffn-hidden-size")]
    assert found == [("--moe-ffn-hidden-size", 100, "refused")]


def test_every_flag_has_one_line() -> None:
    good = f"{GOOD} --transformer-impl local --no-gradient-accumulation-fusion --ffn-hidden-size 64 --tensor-model-parallel-size 1"
    good += " --cuda-graph-modules attn --no-save-optim --lr 1 --recompute-activations --moe-token-drop-policy probs"
    typed = sorted(word for word in good.split() if word.startswith("--"))
    found = support.check_arguments(good.split())
    assert sorted(v.flag for v in found) == typed
    passed = {v.flag for v in found if v.reason == "nothing stands against this value"}
    assert {"--hidden-size", "--transformer-impl", "--no-gradient-accumulation-fusion", "--cuda-graph-modules"} <= passed
    assert {v.flag for v in found if "outside" in v.reason} == {"--no-save-optim", "--lr"}


def test_a_command_line_comes_back_from_its_flags() -> None:
    words = ["--a=1", "--b", "--c", "2", "3", "--d=", "--e=x=y"]
    flags = support.split_flags(words)
    assert (
        support.split_flags(support.join_flags(flags))
        == flags
        == [("--a", ["1"]), ("--b", []), ("--c", ["2", "3"]), ("--d", [""]), ("--e", ["x=y"])]
    )


def test_a_dense_model_has_nothing_to_refuse() -> None:
    assert refusals(["--num-layers", "2", "--hidden-size", "100", "--ffn-hidden-size", "300", "--bf16"]) == {}


def test_defaults_of_a_command_line_are_megatrons() -> None:
    found = refusals(["--num-experts", "8", "--hidden-size", "256"])
    assert set(found) == {"--swiglu", "--add-bias-linear"}


def test_a_transformer_config_is_asked_the_same() -> None:
    shape = {"num_layers": 1, "hidden_size": 128, "num_attention_heads": 4, "num_moe_experts": 4}
    good = TransformerConfig(**shape, gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False)
    support.require_supported(good)
    bad = TransformerConfig(**shape, gated_linear_unit=True, activation_func=torch.nn.functional.gelu)
    with pytest.raises(MoKUnsupportedError) as error:
        support.require_supported(bad)
    assert "gated gelu" in str(error.value)
    assert "--add-bias-linear" in str(error.value)


def test_argv_is_read_as_megatron_would() -> None:
    flags = "--a-b 3 --c --d=x --e 1 2.5 --no-f --disable-g --fp8-format e4m3 --negative -1"
    read = support.namespace_from_argv(flags.split())
    assert read == Namespace(a_b=3, c=True, d="x", e=[1, 2.5], f=False, g=False, fp8="e4m3", negative=-1)


def test_a_missing_library_is_an_error_that_names_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """E-T5."""

    def missing() -> None:
        raise MoKBuildError("mok_megatron is not built: _C.abi3.so is missing; build it")

    monkeypatch.setattr(build, "load_library", missing)
    with pytest.raises(MoKBuildError, match=r"--moe-backend=mok was asked for.*not built.*build it"):
        support.require_runnable(None)


def test_a_gpu_without_kernels_is_refused_with_its_capability_and_what_was_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "build_info", lambda: {"archs": ["90a"]})
    monkeypatch.setattr(build, "load_library", lambda: None)
    support.require_runnable((9, 0))
    with pytest.raises(MoKBuildError, match=r"--moe-backend=mok was asked for .*built for sm_90a, found compute capability 10\.3"):
        support.require_runnable((10, 3))
    monkeypatch.setattr(build, "build_info", lambda: {"archs": []})
    with pytest.raises(MoKBuildError, match=r"host part only.*compute capability 9\.0"):
        support.require_runnable((9, 0))


def test_what_only_the_cpu_executor_can_do_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    base = "--num-experts 8 --swiglu --disable-bias-linear"
    assert "--bf16" not in refused_flags(f"{base} --bf16")
    assert "--bf16" in refused_flags(base)
    assert "--moe-use-legacy-grouped-gemm" in refused_flags(f"{base} --bf16 --moe-use-legacy-grouped-gemm")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not {"--bf16", "--moe-use-legacy-grouped-gemm"} & refused_flags(f"{base} --moe-use-legacy-grouped-gemm")


def refused_flags(line: str) -> set[str]:
    return {v.flag for v in support.check_arguments(line.split()) if v.verdict == "refused"}
