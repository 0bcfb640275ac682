"""The rows of the feature table (read by :mod:`mok_megatron.megatron.support`, printed in docs/feature-table.md and by doctor)."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from mok_megatron.config import CHANNEL_MULTIPLE, MAX_EP_SIZE, MAX_LOCAL_EXPERTS, MAX_TOPK

MISSING: Any = object()
"""The value of a flag that its source does not have."""

INTEGERS = {
    **dict.fromkeys(("num_experts", "num_moe_experts"), 0),
    **dict.fromkeys(("hidden_size", "moe_latent_size", "moe_ffn_hidden_size", "ffn_hidden_size", "moe_router_topk"), 1),
    **dict.fromkeys(
        tuple(f"{kind}_parallel_size" for kind in ("expert_model", "expert_tensor", "tensor_model", "pipeline_model", "context")), 1
    ),
    **dict.fromkeys(("expert_tensor_parallel_num_weight_shards", "mlp_chunks_for_training"), 1),
}
"""Attributes that the rows count with, each with its least value."""


class Values:
    """Flags as Megatron's arguments, a TransformerConfig or a command line have them."""

    def __init__(self, source: Any, environ: dict[str, str], *, from_command_line: bool) -> None:
        self._source = source
        self.environ = environ
        # On a command line, what is absent has Megatron's default; an object that lacks an attribute says nothing about it.
        self._absent_means_default = from_command_line
        self.malformed = {name: reason for name in INTEGERS if (reason := self._fault_of_integer(name)) is not None}
        """Names whose value is not of their kind, with the rule. For the rows they are absent."""

    def _fault_of_integer(self, name: str) -> str | None:
        value = getattr(self._source, name, MISSING)
        if value is MISSING or (value is None and not self._absent_means_default):
            return None
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            return "must be one integer"
        return f"must be at least {INTEGERS[name]}" if value < INTEGERS[name] else None

    def first(self, *names: str) -> Any:
        """Value of the first of ``names`` that there is, else :data:`MISSING`."""
        for name in names:
            if name in self.malformed:
                continue
            value = getattr(self._source, name, MISSING)
            if value is not MISSING:
                return value
        return MISSING

    def get(self, name: str, default: Any = None) -> Any:
        """Value of ``name``; ``default`` where it is absent or None."""
        value = self.first(name)
        return default if value is MISSING or value is None else value

    @property
    def num_experts(self) -> int:
        return self.get("num_moe_experts") or self.get("num_experts") or 0

    @property
    def ep_size(self) -> int:
        return self.get("expert_model_parallel_size", 1)

    @property
    def expert_tp_size(self) -> int:
        """Megatron's rule: the tensor-parallel size unless it is given."""
        return self.get("expert_tensor_parallel_size") or self.get("tensor_model_parallel_size", 1)

    @property
    def width(self) -> int:
        """H of the routed experts."""
        return self.get("moe_latent_size") or self.get("hidden_size", 0)

    @property
    def intermediate_size(self) -> int:
        """I, by Megatron's rules for its default; 0 where nothing is known."""
        given = self.get("moe_ffn_hidden_size") or self.get("ffn_hidden_size")
        if given:
            return given
        hidden = self.get("hidden_size", 0)
        return int(4 * hidden * 2 / 3 / 64) * 64 if self.get("swiglu", False) else 4 * hidden

    @property
    def activation(self) -> str:
        """Name of the experts' activation; "swiglu" is the one the kernels have."""
        function = self.first("activation_func")
        if function is not MISSING:  # a TransformerConfig
            gated = bool(self.get("gated_linear_unit", False))
            if function is F.silu:
                return "swiglu" if gated else "silu"
            name = getattr(function, "__name__", str(function))
            return f"gated {name}" if gated else name
        for name in ("swiglu", "quick_geglu", "squared_relu"):
            if self.get(name, False):
                return name
        return "gelu"

    @property
    def names_activation(self) -> bool:
        """Whether the source tells the activation at all."""
        known = (self.first("activation_func") is not MISSING, self.first("swiglu") is not MISSING)
        return any(known) or self._absent_means_default

    @property
    def has_bias(self) -> bool:
        return bool(self.get("add_bias_linear", self._absent_means_default))

    def names_in(self, name: str) -> set[str]:
        """A flag that lists names (strings or enum members), as lower-case strings."""
        value = self.get(name, [])
        items = value if isinstance(value, (list, tuple, set)) else str(value).split(",")
        return {str(getattr(item, "name", item)).lower() for item in items if item not in ("", None)}

    @property
    def graph_modules(self) -> set[str]:
        # The last is what --cuda-graph-scope is called between 0.19's parsing and its validation.
        return set().union(*map(self.names_in, ("cuda_graph_modules", "cuda_graph_scope", "cuda_graph_scope_deprecated")))

    @property
    def uses_graphs(self) -> bool:
        implementation = self.get("cuda_graph_impl", "none")
        return implementation != "none" or bool(self.get("enable_cuda_graph") or self.get("external_cuda_graph"))


def _is_set(value: Any, values: Values) -> bool:
    return bool(value)


@dataclass(frozen=True)
class Feature:
    """One row.

    ``names`` are the attributes in Megatron's arguments or TransformerConfig that are looked up, first found; no names: the row
    looks at the values itself. ``applies(value, values)`` says whether the row has something to say; ``shown(values)`` is what a
    message shows instead of the attribute's value. ``covers`` are attributes beside those of ``flag`` and ``names`` that its verdict
    is about.
    """

    flag: str
    names: tuple[str, ...]
    verdict: str
    reason: str
    applies: Callable[[Any, Values], bool] = _is_set
    shown: Callable[[Values], Any] | None = None
    covers: tuple[str, ...] = ()

    @property
    def attributes(self) -> set[str]:
        """Every attribute that the row is about."""
        return {_attribute(self.flag), *self.names, *self.covers}


def _supported(flag: str, reason: str, *names: str, when: Callable[[Any, Values], bool] = _is_set) -> Feature:
    return Feature(flag, names or (_attribute(flag),), "supported", reason, when)


def _transparent(flag: str, reason: str, *names: str, when: Callable[[Any, Values], bool] = _is_set) -> Feature:
    return Feature(flag, names or (_attribute(flag),), "transparent", reason, when)


def _refused(
    flag: str,
    reason: str,
    *names: str,
    when: Callable[[Any, Values], bool] = _is_set,
    shown: Callable[[Values], Any] | None = None,
) -> Feature:
    return Feature(flag, names or (_attribute(flag),), "refused", reason, when, shown)


def _refused_by_rule(
    flag: str,
    reason: str,
    *,
    when: Callable[[Values], bool],
    shown: Callable[[Values], Any] | None = None,
    covers: tuple[str, ...] = (),
) -> Feature:
    return Feature(flag, (), "refused", reason, lambda _, values: when(values), shown, covers)


def _attribute(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


_GRAPHABLE = {"attn", "mlp", "mamba", "moe_router", "moe_preprocess"}


def _on_gpu_in_fp32(values: Values) -> bool:
    # A TransformerConfig may be of a model that is cast later; the workspace looks at the tensors themselves.
    parsed = values.first("num_experts") is not MISSING
    return bool(parsed and values.num_experts and torch.cuda.is_available() and not values.get("bf16") and not values.get("fp16"))


def _expandable_segments(values: Values) -> bool:
    if not torch.cuda.is_available():
        return False
    settings = (values.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return any("expandable_segments:true" in setting.lower().replace(" ", "") for setting in settings)


FEATURES: tuple[Feature, ...] = (
    # Shapes and parallelism
    _refused(
        "--hidden-size",
        f"the width of the routed experts must be a multiple of {CHANNEL_MULTIPLE}",
        when=lambda v, s: bool(s.num_experts and s.width % CHANNEL_MULTIPLE and not s.get("moe_latent_size")),
    ),
    _refused(
        "--moe-latent-size",
        f"the width of the routed experts must be a multiple of {CHANNEL_MULTIPLE}",
        when=lambda v, s: bool(v and v % CHANNEL_MULTIPLE),
    ),
    _refused_by_rule(
        "--moe-ffn-hidden-size",
        f"the experts' intermediate size must be a multiple of {CHANNEL_MULTIPLE}",
        when=lambda s: bool(s.num_experts and s.intermediate_size % CHANNEL_MULTIPLE),
        shown=lambda s: s.intermediate_size,
        covers=("ffn_hidden_size",),
    ),
    _refused(
        "--expert-model-parallel-size",
        f"one expert-parallel group has at most {MAX_EP_SIZE} ranks, those of one NVLink domain of one host",
        when=lambda v, s: bool(v and v > MAX_EP_SIZE),
    ),
    _refused(
        "--expert-model-parallel-size",
        "the number of experts must be a multiple of the expert-parallel size",
        when=lambda v, s: bool(v and s.num_experts and s.num_experts % v),
    ),
    _refused_by_rule(
        "--num-experts",
        f"a rank holds at most {MAX_LOCAL_EXPERTS} experts",
        when=lambda s: s.num_experts // max(s.ep_size, 1) > MAX_LOCAL_EXPERTS,
        shown=lambda s: f"{s.num_experts} at expert-parallel size {s.ep_size}",
    ),
    _refused(
        "--moe-router-topk",
        f"a token has at most {MAX_TOPK} routes",
        when=lambda v, s: bool(v and s.num_experts and v > MAX_TOPK),
    ),
    _supported("--expert-model-parallel-size", f"1 to {MAX_EP_SIZE} ranks", when=lambda v, s: bool(v and 1 < v <= MAX_EP_SIZE)),
    _refused_by_rule(
        "--expert-tensor-parallel-size",
        "an expert's matrices must be whole on one rank; with --tensor-model-parallel-size above 1 give --expert-tensor-parallel-size 1",
        when=lambda s: bool(s.num_experts and s.expert_tp_size > 1),
        shown=lambda s: s.expert_tp_size,
    ),
    _transparent("--tensor-model-parallel-size", "the layer sees sequence-parallel shards of tokens", when=lambda v, s: bool(v and v > 1)),
    _transparent("--context-parallel-size", "the layer sees its shard of tokens", when=lambda v, s: bool(v and v > 1)),
    _supported(
        "--pipeline-model-parallel-size",
        "microbatches in flight keep their activations apart, virtual stages included",
        when=lambda v, s: bool(v and v > 1),
    ),
    *(
        _supported(flag, "each model chunk has layers of its own, and no call shares what it keeps")
        for flag in ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")
    ),
    *(
        _supported(flag, "ranks may bring different numbers of tokens; --mok-max-tokens-per-rank bounds them")
        for flag in ("--variable-seq-lengths", "--hybrid-context-parallel", "--dynamic-context-parallel")
    ),
    _supported("--num-experts", "spread evenly over the expert-parallel group", "num_experts", "num_moe_experts"),
    _transparent("--moe-layer-freq", "dense layers stay Megatron's", when=lambda v, s: v not in (None, 1)),
    _refused(
        "--expert-tensor-parallel-num-weight-shards",
        "expert weights that are gathered for each use are not supported",
        when=lambda v, s: bool(v and v > 1),
    ),
    # Experts
    _supported("--moe-grouped-gemm", "TEGroupedMLP's weights are read where they lie; without the flag SequentialMLP's"),
    _supported("--moe-use-legacy-grouped-gemm", "GroupedMLP's weights are read where they lie, as transposed views (CPU executor)"),
    _refused(
        "--moe-use-legacy-grouped-gemm",
        "the GPU kernels read no transposed weights; give --moe-grouped-gemm with Transformer Engine, whose weights they read",
        when=lambda v, s: bool(v and torch.cuda.is_available()),
    ),
    _refused("--moe-single-grouped-weight", "one parameter that holds all experts in TE's GroupedTensor is not supported yet"),
    _refused("--moe-single-grouped-bias", "expert biases are not supported"),
    _transparent("--moe-use-grouped-tensor", "MoK takes the place of Transformer Engine's fused experts"),
    _transparent("--use-transformer-engine-op-fuser", "MoK takes the place of Transformer Engine's fused experts"),
    _refused_by_rule(
        "--swiglu",
        "the kernels compute SwiGLU and no other activation",
        when=lambda s: bool(s.num_experts and s.names_activation and s.activation != "swiglu"),
        shown=lambda s: f"off; the activation is {s.activation}",
        covers=("quick_geglu", "squared_relu"),
    ),
    _supported("--swiglu", "the kernels' activation"),
    _refused("--activation-func-clamp-value", "clamped SwiGLU is not supported", when=lambda v, s: v is not None and v is not False),
    _refused("--glu-linear-offset", "an offset of the linear half is not supported"),
    _refused("--use-te-activation-func", "the activation is computed inside the kernels"),
    _refused(
        "--moe-mlp-glu-interleave-size",
        "gate and up rows must lie one after the other, not interleaved",
        when=lambda v, s: v is not None and v is not False,
    ),
    _refused_by_rule(
        "--add-bias-linear",
        "expert biases are not supported; give --disable-bias-linear",
        when=lambda s: bool(s.num_experts and s.has_bias),
        shown=lambda s: True,
    ),
    _refused("--moe-apply-probs-on-input", "the router weight multiplies the activation, not the input"),
    _transparent("--moe-latent-size", "the projections stay Megatron's; the experts' width is the latent size"),
    _transparent("--moe-use-upcycling", "the parameters are Megatron's own"),
    # Router
    _supported("--moe-router-topk", "up to 32, read from the routing map", when=lambda v, s: bool(s.num_experts)),
    *(
        _transparent(flag, "upstream of the routing map and the probabilities")
        for flag in (
            "--moe-router-load-balancing-type",
            "--moe-aux-loss-coeff",
            "--moe-z-loss-coeff",
            "--moe-router-pre-softmax",
            "--moe-router-score-function",
            "--moe-router-num-groups",
            "--moe-router-group-topk",
            "--moe-router-topk-scaling-factor",
            "--moe-router-enable-expert-bias",
            "--moe-router-bias-update-rate",
            "--moe-router-force-load-balancing",
            "--moe-router-force-biased",
            "--moe-router-quantile-balancing-ema",
            "--moe-router-fusion",
            "--moe-input-jitter-eps",
            "--moe-token-drop-policy",
            "--moe-enable-routing-replay",
        )
    ),
    _supported("--moe-router-dtype", "router weights are FP32 inside; their gradient has the router's dtype"),
    _transparent("--moe-router-padding-for-quantization", "MoK pads inside its schedule"),
    _transparent("--moe-router-padding-for-fp8", "MoK pads inside its schedule"),
    _supported("--moe-expert-capacity-factor", "dropped routes have no row", when=lambda v, s: v is not None and v is not False),
    _refused("--moe-pad-expert-input-to-capacity", "a token may then have more than K routes, and MoK never pads experts"),
    _refused(
        "--moe-expert-rank-capacity-factor",
        "MoK drops nothing; its own bound is --mok-schedule-capacity-multiplier",
        when=lambda v, s: v is not None and v is not False,
    ),
    # Dispatchers
    _transparent("--moe-token-dispatcher-type", "not used by MoK layers"),
    _transparent("--moe-flex-dispatcher-backend", "not used by MoK layers"),
    _transparent("--moe-enable-deepep", "not used by MoK layers"),
    _transparent("--moe-permute-fusion", "MoK permutes nothing"),
    _refused("--moe-dispatch-fwd-dtype", "rows cross the wire in BF16", when=lambda v, s: v not in (None, "bf16")),
    _refused("--moe-combine-bwd-dtype", "rows cross the wire in BF16", when=lambda v, s: v not in (None, "bf16")),
    # Shared experts
    _transparent("--moe-shared-expert-intermediate-size", "the shared expert is Megatron's and may have any width"),
    _transparent("--moe-shared-expert-gate", "the shared expert is Megatron's"),
    _transparent("--use-grouped-gemm-for-shared-expert", "the shared expert is Megatron's"),
    _supported("--moe-shared-expert-overlap", "the shared expert runs on its stream beside the megakernel"),
    # Overlap and split backward
    _refused("--overlap-moe-expert-parallel-comm", "its schedule calls dispatch, experts and combine one by one; MoK is one call"),
    _refused("--ep-overlap-early-attn-memory-release", "it belongs to --overlap-moe-expert-parallel-comm"),
    _refused("--delay-wgrad-compute", "weight gradients are part of the one backward kernel"),
    _refused("--overlap-dispatch-backward-with-experts-wgrad", "weight gradients are part of the one backward kernel"),
    # Memory
    _supported("--recompute-granularity", "full, and selective with module moe: the forward pass runs again"),
    _supported("--recompute-activations", "short for --recompute-granularity selective"),
    _transparent("--recompute-modules", "moe_act is always recomputed; the others are upstream of the experts"),
    _refused("--moe-paged-stash", "MoK keeps no expert activations that could be stashed"),
    _refused_by_rule(
        "--offload-modules",
        "expert_fc1, moe_act and fused_group_mlp do not exist as separate activations",
        when=lambda s: bool(
            s.get("fine_grained_activation_offloading", False) and s.names_in("offload_modules") & {"expert_fc1", "moe_act", "fused_group_mlp"}
        ),
        shown=lambda s: sorted(s.names_in("offload_modules")),
        covers=("fine_grained_activation_offloading",),
    ),
    _supported("--cpu-offloading", "what a call keeps goes through saved-tensor hooks"),
    _refused_by_rule(
        "PYTORCH_ALLOC_CONF",
        "expandable_segments:True breaks the mapping of symmetric memory; unset it",
        when=_expandable_segments,
        shown=lambda s: s.environ.get("PYTORCH_ALLOC_CONF") or s.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
    ),
    # CUDA graphs
    _refused_by_rule(
        "--cuda-graph-impl",
        "a graph that contains the experts (full_iteration, scope moe, or no scope) is not supported; scopes attn, mlp, mamba, "
        "moe_router and moe_preprocess are",
        when=lambda s: bool(
            s.uses_graphs and (s.get("cuda_graph_impl") == "full_iteration" or not s.graph_modules or s.graph_modules - _GRAPHABLE)
        ),
        shown=lambda s: f"{s.get('cuda_graph_impl', 'local')} with {sorted(s.graph_modules) or 'no scope'}",
        covers=("cuda_graph_modules", "cuda_graph_scope", "enable_cuda_graph", "external_cuda_graph"),
    ),
    _supported("--cuda-graph-impl", "router and preprocessing in the graph, experts eager", when=lambda v, s: v not in (None, "none")),
    *(
        _supported(flag, "attn, mlp, mamba, moe_router and moe_preprocess; no part of the experts", when=lambda v, s: s.uses_graphs)
        for flag in ("--cuda-graph-modules", "--cuda-graph-scope")
    ),
    # Gradients and data parallelism
    _supported("--gradient-accumulation-fusion", "main_grad is written by the backward pass, with or without it"),
    _supported("--overlap-grad-reduce", "each expert parameter's hook fires once a backward"),
    _supported("--overlap-param-gather", "the pre-forward hooks of the experts' modules are fired"),
    _supported("--use-distributed-optimizer", "nothing is added to a checkpoint or to the optimizer"),
    _supported("--accumulate-allreduce-grads-in-fp32", "main_grad in FP32 or BF16"),
    _supported("--use-megatron-fsdp", "gradients through get_main_grad(), overwritten where asked; BF16 weights"),
    _refused("--use-torch-fsdp2", "its DTensors stay sharded while the kernel reads them; use --use-megatron-fsdp"),
    # Precision
    _supported("--bf16", "BF16 weights and rows, FP32 accumulation; without it FP32, on the CPU executor only"),
    _refused_by_rule("--bf16", "the GPU kernels compute in BF16 and nothing else", when=_on_gpu_in_fp32, shown=lambda s: "off"),
    _refused("--fp16", "the kernels have no FP16; use --bf16"),
    _refused(
        "--fp8-format",
        "MXFP8 is not supported yet and the other FP8 recipes are not planned; the experts run in BF16 or FP32",
        "fp8",
    ),
    _transparent("--fp8-recipe", "says how FP8 is done; --fp8-format, which asks for FP8, is refused"),
    _refused("--fp8-param-gather", "quantised expert weights are not supported yet", "fp8_param", "fp8_param_gather"),
    _refused("--fp4-format", "NVFP4 is not supported; the experts run in BF16 or FP32", "fp4"),
    _refused("--te-precision-config-file", "precision of single modules cannot be followed inside the fused experts"),
    _transparent("--first-last-layers-bf16", "all layers run in the model's precision"),
    _supported("--deterministic-mode", "the same inputs give the same bits in every run"),
    _refused("--batch-invariant-mode", "it is a mode of stock kernels, which MoK layers do not call"),
    # Other
    _refused("--use-kitchen", "it replaces the experts' linear layers"),
    _refused("--modelopt-enabled", "it replaces the experts' linear layers"),
    _refused("--export-te-mcore-model", "it replaces the experts' linear layers"),
    _refused("--lora-rank", "LoRA and other PEFT-wrapped experts are not supported", "lora_rank", "peft"),
    _refused(
        "--transformer-impl",
        "inference_optimized has experts and dispatchers of its own",
        when=lambda v, s: v == "inference_optimized",
    ),
    _supported("--mtp-num-layers", "a layer may be entered several times a forward"),
    _supported("--mlp-chunks-for-training", "the number of tokens may differ between calls", when=lambda v, s: (v or 1) > 1),
    _transparent("--hybrid-layer-pattern", "the same MoE layer", "hybrid_layer_pattern", "hybrid_override_pattern"),
    _transparent("--rerun-mode", "an iteration may be run again and gives the same bits"),
    _transparent("--optimizer", "parameters, main_grad and hooks are Megatron's"),
    _supported("--inprocess-restart", "workspaces are made anew after a failure"),
)
"""Every flag that has to do with the routed experts, and fields of TransformerConfig that are no flags, spelled as if they were."""

OFF_SWITCHES = ("--disable-bias-linear", "--no-gradient-accumulation-fusion")
"""How Megatron spells that a row's attribute is off where its parser has no flag that sets it."""
