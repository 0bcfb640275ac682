"""The real grouped expert modules in a real MoE layer. Their own forward needs CUDA and is never called: MoK reads the weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.moe import experts as megatron_experts
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from torch import Tensor, nn

from mok_megatron import MoKConfig
from tests.megatron import helpers
from tests.megatron.helpers import build_layer, chosen_backend, make_config, run_layer, start_megatron, tokens


class GroupedLinear(nn.Module):
    """Transformer Engine's GroupedLinear as far as its parameters go."""

    def __init__(self, num_gemms: int, input_size: int, output_size: int, **options: Any) -> None:
        super().__init__()
        for index in range(num_gemms):
            parameter = nn.Parameter(torch.zeros(output_size, input_size, dtype=options["config"].params_dtype))
            parameter.allreduce = True
            self.register_parameter(f"weight{index}", parameter)

    def forward(self, *inputs: Any) -> None:
        raise AssertionError("Transformer Engine's forward was called")


def te_grouped() -> Any:
    if helpers.MEGATRON < (0, 17):
        from megatron.core.transformer.mlp import MLPSubmodules
        from megatron.core.transformer.spec_utils import ModuleSpec

        return ModuleSpec(
            module=megatron_experts.TEGroupedMLP,
            submodules=MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear),
        )
    linears = SimpleNamespace(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear, activation_func=None)

    def build(num_local_experts: int, config: Any, **options: Any) -> nn.Module:
        return megatron_experts.TEGroupedMLP(num_local_experts, config, submodules=linears, **options)

    return build


def legacy_grouped() -> Any:
    from megatron.core.transformer.spec_utils import ModuleSpec

    return ModuleSpec(module=megatron_experts.GroupedMLP)


LAYOUTS = {"TEGroupedMLP": te_grouped}
if helpers.MEGATRON < (0, 17):
    LAYOUTS["GroupedMLP"] = legacy_grouped


@pytest.fixture(autouse=True)
def no_grouped_gemm_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """GroupedMLP asks for a package that only its own forward uses."""
    if helpers.MEGATRON < (0, 17):
        monkeypatch.setattr(megatron_experts.gg, "assert_grouped_gemm_is_available", lambda: None)


def expert_matrices(layer: Any, attribute: str = "data") -> list[Tensor]:
    """E matrices [2I, H], then E matrices [H, I], whatever the layout."""
    experts = layer.experts
    count, hidden = layer.num_local_experts, layer.config.hidden_size
    if hasattr(experts, "local_experts"):
        pairs = [(e.linear_fc1.weight, e.linear_fc2.weight) for e in experts.local_experts]
        kinds = list(zip(*pairs, strict=True))
    elif hasattr(experts, "weight1"):
        first = getattr(experts.weight1, attribute).view(count, hidden, -1).transpose(1, 2)
        second = getattr(experts.weight2, attribute).view(count, -1, hidden).transpose(1, 2)
        return [*first, *second]
    else:
        linears = (experts.linear_fc1, experts.linear_fc2)
        kinds = [[getattr(linear, f"weight{i}") for i in range(count)] for linear in linears]
    return [getattr(p, attribute) for kind in kinds for p in kind]


def build_pair(layout: str) -> tuple[Any, Any]:
    """A MoK layer with grouped experts and one with SequentialMLP, with the same weights."""
    start_megatron(1)
    config = make_config()
    sequential = build_layer("mok", config)
    with chosen_backend("mok", knobs=MoKConfig(timeout_seconds=30)):
        grouped = MoELayer(config=config, submodules=MoESubmodules(experts=LAYOUTS[layout]()))
    grouped.set_layer_number(1)
    with torch.no_grad():
        grouped.router.weight.copy_(sequential.router.weight)
        for target, source in zip(expert_matrices(grouped), expert_matrices(sequential), strict=True):
            target.copy_(source)
    return grouped, sequential


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_bits_as_sequential_experts(layout: str) -> None:
    grouped, sequential = build_pair(layout)
    x, dy = tokens((20, 1, 64), 1), tokens((20, 1, 64), 2)
    ours, expected = run_layer(grouped, x, dy), run_layer(sequential, x, dy)
    for name in ("y", "dx", "router.weight"):
        assert torch.equal(ours[name], expected[name]), name
    for got, wanted in zip(expert_matrices(grouped, "grad"), expert_matrices(sequential, "grad"), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_main_grad_under_ddp(layout: str) -> None:
    grouped, sequential = build_pair(layout)
    x, dy = tokens((20, 1, 64), 1), tokens((20, 1, 64), 2)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)
    for layer in (grouped, sequential):
        model = DistributedDataParallel(layer.config, ddp, layer)
        model.zero_grad_buffer()
        for last in (False, True):
            if last:
                model(x.clone().requires_grad_(True))[0].backward(dy)
            else:
                with model.no_sync():
                    model(x.clone().requires_grad_(True))[0].backward(dy)
        model.finish_grad_sync()
    for got, wanted in zip(expert_matrices(grouped, "main_grad"), expert_matrices(sequential, "main_grad"), strict=True):
        assert torch.equal(got, wanted) and bool(wanted.any())


@pytest.mark.parametrize("layout", [*LAYOUTS, "SequentialMLP"])
def test_overlapped_parameter_gather_is_waited_for(layout: str) -> None:
    """Megatron's own pre-forward hooks: each expert parameter's bucket is finished before the first weight is read."""
    layer = build_layer("mok", make_config()) if layout == "SequentialMLP" else build_pair(layout)[0]
    start_megatron(1)
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        use_distributed_optimizer=True,
        bucket_size=1,  # a bucket for each parameter
    )
    model = DistributedDataParallel(layer.config, config, layer)
    finished: set[Tensor] = set()
    for group in {*model.bucket_groups, *model.expert_parallel_bucket_groups}:
        # Stands for an all-gather that is still under way: the right values arrive when it is waited for.
        arriving = {p: p.detach().clone() for bucket in group.buckets for p in bucket.params_list}
        for parameter in arriving:
            parameter.data.zero_()

        def finish_param_sync(skip_next_bucket_dispatch: bool = False, arriving: Any = arriving) -> None:
            for parameter, value in arriving.items():
                parameter.data.copy_(value)
                finished.add(parameter)

        group.finish_param_sync = finish_param_sync
    with torch.no_grad():
        y, _ = model(tokens((20, 1, 64), 1))
    assert finished == set(layer.parameters())
    model.disable_forward_pre_hook(param_sync=False)
    with torch.no_grad():
        assert torch.equal(layer(tokens((20, 1, 64), 1))[0], y)


def sharded(layer: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {"singleton_local_shards": False}
    return layer.sharded_state_dict("decoder.layers.0.mlp.", (), metadata)


if "GroupedMLP" in LAYOUTS:

    def test_d_t2_grouped_and_sequential_checkpoints(tmp_path: Path) -> None:
        """Gate rows 1, up rows 2, fc2 100 and more, plus the expert: a transpose or a gate/up swap shows."""
        grouped, sequential = build_pair("GroupedMLP")
        count, half = 4, grouped.config.moe_ffn_hidden_size
        wanted = []
        for index, matrix in enumerate(expert_matrices(grouped)):
            with torch.no_grad():
                matrix.copy_(torch.arange(matrix.shape[0]).view(-1, 1) >= half if index < count else torch.full((), 100.0))
                matrix += 1 + index % count * 10 + torch.arange(matrix.shape[1]) / 256
            wanted.append(matrix.clone())
        for source, target in ((grouped, sequential), (sequential, grouped)):
            folder = tmp_path / type(source.experts).__name__
            folder.mkdir()
            dist_checkpointing.save(sharded(source), str(folder))
            for matrix in expert_matrices(target):
                matrix.data.zero_()
            loaded = dist_checkpointing.load(sharded(target), str(folder))
            target.load_state_dict({k.removeprefix("decoder.layers.0.mlp."): v for k, v in loaded.items()})
            for got, value in zip(expert_matrices(target), wanted, strict=True):
                assert torch.equal(got, value)
        x, dy = tokens((20, 1, 64), 1), tokens((20, 1, 64), 2)
        assert torch.equal(run_layer(grouped, x, dy)["y"], run_layer(sequential, x, dy)["y"])
