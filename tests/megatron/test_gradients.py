"""main_grad under Megatron's own DistributedDataParallel, and under a stand-in for Megatron-FSDP (which needs CUDA): B-T1 to B-T5."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import Tensor

from mok_megatron.megatron import gradients
from tests.distributed import RankPool
from tests.megatron import helpers
from tests.megatron.helpers import build_layer, make_config, start_megatron, tokens


def wrap(backend: str, ep_size: int = 1, dtype: torch.dtype = torch.float32, **options: Any) -> DistributedDataParallel:
    """An MoE layer of ``backend`` under Megatron's DDP. ``ddp``: its configuration; the rest goes to TransformerConfig."""
    ddp = options.pop("ddp", {})
    config = make_config(ep_size, dtype, **options)
    ddp_config = DistributedDataParallelConfig(**{"grad_reduce_in_fp32": True, **ddp})
    return DistributedDataParallel(config, ddp_config, build_layer(backend, config))


def microbatches(model: DistributedDataParallel, runs: list[tuple[Tensor, Tensor]], finish: bool = True) -> dict[str, Tensor]:
    """One iteration of Megatron's: zeroed buffers, forward and backward of each microbatch, reduction with the last."""
    model.zero_grad_buffer()
    for index, (x, dy) in enumerate(runs):
        last = index == len(runs) - 1

        def step(x: Tensor = x, dy: Tensor = dy) -> None:
            model(x.clone().requires_grad_(True))[0].backward(dy)

        if last:
            step()
        else:
            with model.no_sync():
                step()
    if finish:
        model.finish_grad_sync()
    return helpers.named_gradients(model.module, "main_grad")


OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 4096}


def binary_coded(model: Any, gradients_of: Callable[[list[tuple[Tensor, Tensor]]], dict[str, Tensor]]) -> None:
    """B-T1. 1 = only the first counts, 8 = only the last, 30 = added twice, 7 or 14 = one lost."""
    x, dy = tokens((16, 1, 64), 1), tokens((16, 1, 64), 2)
    one = gradients_of([(x, dy)])
    four = gradients_of([(x, dy * 2.0**i) for i in range(4)])
    for name, gradient in one.items():
        if "expert" not in name:
            continue
        worst = (four[name] - 15 * gradient).abs().max()
        assert worst <= 1e-6 * 15 * gradient.abs().max(), (name, float((four[name] / gradient).median()))
        assert bool((gradient != 0).any()), name


@pytest.mark.parametrize("backend", ["mok", "alltoall"])
@pytest.mark.parametrize("ddp", [{}, OVERLAP], ids=["plain", "overlap"])
def test_b_t1_binary_coded_microbatches(backend: str, ddp: dict[str, Any]) -> None:
    start_megatron(1)
    model = wrap(backend, ddp=ddp)
    binary_coded(model, lambda runs: microbatches(model, runs))


class FsdpParameters:
    """What Megatron-FSDP does to parameters.

    Sharded gradients (ZeRO-2, ZeRO-3): ``get_main_grad`` gives a communication bucket with anything in it, to be overwritten; after each
    backward it is added to the shard. Unsharded gradients: one buffer, added to.
    """

    def __init__(self, layer: Any, sharded: bool) -> None:
        self.layer, self.sharded = layer, sharded
        self.parameters = dict(layer.experts.named_parameters())
        self.buffers = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        for name, parameter in self.parameters.items():
            parameter.get_main_grad = self._getter(name)
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: self._reduce(name))
        self.reduced: list[str] = []
        self.unshard()

    def unshard(self) -> None:
        for parameter in self.parameters.values():
            parameter.__fsdp_param__ = True
            parameter.grad_added_to_main_grad = False
            parameter.overwrite_main_grad = self.sharded

    def _getter(self, name: str) -> Callable[[], Tensor]:
        def get_main_grad() -> Tensor:
            if self.sharded:
                return torch.full(self.buffers[name].shape, float("nan"))
            return self.buffers[name]

        return get_main_grad

    def _reduce(self, name: str) -> None:
        parameter = self.parameters[name]
        assert parameter.grad is not None
        assert parameter.grad_added_to_main_grad
        if self.sharded:
            self.buffers[name] += parameter.main_grad
        parameter.grad = None
        parameter.grad_added_to_main_grad = False
        self.reduced.append(name)

    def run(self, runs: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        for buffer in self.buffers.values():
            buffer.zero_()
        for x, dy in runs:
            self.unshard()
            self.reduced.clear()
            self.layer(x.clone().requires_grad_(True))[0].backward(dy)
            assert sorted(self.reduced) == sorted(self.parameters), "each hook fires once a backward"
        return {f"experts.{name}": buffer.clone() for name, buffer in self.buffers.items()}


@pytest.mark.parametrize("sharded", [False, True], ids=["no-shard", "sharded"])
def test_b_t1_under_megatron_fsdp(sharded: bool) -> None:
    start_megatron(1)
    layer = build_layer("mok", make_config())
    fsdp = FsdpParameters(layer, sharded)
    binary_coded(layer, fsdp.run)
    x, dy = tokens((16, 1, 64), 1), tokens((16, 1, 64), 2)
    plain = helpers.run_layer(build_layer("mok", make_config()), x, dy)
    for name, gradient in fsdp.run([(x, dy)]).items():
        assert torch.equal(gradient, plain[name]), name


def two_hundred_and_fifty_seven(grad_reduce_in_fp32: bool) -> dict[str, tuple[Tensor, Tensor]]:
    """Per expert parameter: main_grad of microbatches with wgrad 1x and 256x, and of the 1x alone.

    One token of ones and a bf16 model: each wgrad is one product of an 8-bit number and a power of two, hence exact.
    """
    start_megatron(1)
    # bf16: the router is kept out of it by a fixed choice of experts.
    model = wrap(
        "mok",
        1,
        torch.bfloat16,
        ddp={"grad_reduce_in_fp32": grad_reduce_in_fp32},
        moe_router_topk=1,
        moe_router_pre_softmax=True,
        num_moe_experts=2,
    )
    model.module.router.forward = lambda x, mask=None: (
        torch.tensor([[0.0, 1.0]], dtype=torch.bfloat16),
        torch.tensor([[False, True]]),
    )
    x, dy = torch.ones(1, 1, 64, dtype=torch.bfloat16), torch.ones(1, 1, 64, dtype=torch.bfloat16)

    def grads(runs: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        microbatches(model, runs)
        return {n: p.main_grad.clone() for n, p in model.module.experts.named_parameters() if "local_experts.1." in n}

    one, both = grads([(x, dy)]), grads([(x, dy * 256), (x, dy)])
    return {name: (both[name], one[name]) for name in one}


def test_b_t2_fp32_main_grad_keeps_the_small_microbatch() -> None:
    for name, (both, one) in two_hundred_and_fifty_seven(True).items():
        assert both.dtype == torch.float32
        assert torch.equal(both, 257 * one), name
        assert bool(one.any())


def test_b_t2_bf16_main_grad_is_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    gradients._warned_about_bf16 = False
    with caplog.at_level(logging.WARNING):
        found = two_hundred_and_fifty_seven(False)
    for name, (both, one) in found.items():
        assert both.dtype == torch.bfloat16
        assert torch.equal(both, (257 * one.float()).bfloat16()), name
    assert [r.message for r in caplog.records if "BF16 main_grad" in r.message] != []
    caplog.clear()
    two_hundred_and_fifty_seven(True)
    assert "BF16" not in caplog.text


@pytest.mark.parametrize("overwrite", [False, True])
def test_b_t3_cold_expert(overwrite: bool) -> None:
    """main_grad prefilled with 7 (or NaN where it is overwritten); the expert gets no token."""
    start_megatron(1)
    layer = build_layer("mok", make_config())
    layer.router.forward = lambda x, mask=None: (
        torch.full((6, 4), 0.5),
        torch.tensor([True, True, False, False]).expand(6, 4),
    )
    for parameter in layer.experts.parameters():
        parameter.main_grad = torch.full(parameter.shape, float("nan") if overwrite else 7.0)
        parameter.grad_added_to_main_grad = False
        parameter.overwrite_main_grad = overwrite
    layer(tokens((6, 1, 64), 1).requires_grad_(True))[0].sum().backward()
    for name, parameter in layer.experts.named_parameters():
        if "local_experts.2." in name or "local_experts.3." in name:
            cold = 0.0 if overwrite else 7.0
            assert torch.equal(parameter.main_grad, torch.full(parameter.shape, cold)), name
        else:
            assert bool(parameter.main_grad.isfinite().all()) and bool((parameter.main_grad != 7.0).any()), name


@pytest.mark.parametrize("zero_out", [False, True])
@pytest.mark.parametrize("ddp", [{}, OVERLAP], ids=["plain", "overlap"])
def test_b_t4_hooks_and_dummies(ddp: dict[str, Any], zero_out: bool) -> None:
    """Each hook once, flags set, DDP's gradient present, and garbage in the dummies never reaches main_grad."""
    start_megatron(1)
    model = wrap("mok", ddp=ddp, moe_shared_expert_intermediate_size=64)
    plain = wrap("mok", moe_shared_expert_intermediate_size=64)
    x, dy = tokens((16, 1, 64), 1), tokens((16, 1, 64), 2)
    expected = microbatches(plain, [(x, dy), (x, dy)])
    experts = dict(model.module.experts.named_parameters())
    fired: list[str] = []
    grads: list[Tensor | None] = []
    for name, parameter in experts.items():
        parameter.zero_out_wgrad = zero_out
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        model.grad_accs.append(node)

        def note(*unused: Any, name: str = name, parameter: Any = parameter) -> None:
            fired.append(name)
            assert parameter.grad_added_to_main_grad is True

        node.register_hook(note)
        node.register_prehook(lambda g: grads.append(g[0]))
        key = (parameter.shape, parameter.dtype, parameter.device)
        gradients._dummies[key] = torch.empty(parameter.shape)
    for dummy in gradients._dummies.values():
        dummy.fill_(12345.0)
    actual = microbatches(model, [(x, dy), (x, dy)])
    assert sorted(fired) == sorted([*experts, *experts])
    assert all(g is not None for g in grads)
    for name, gradient in expected.items():
        assert torch.equal(actual[name], gradient), name


def test_dummies_share_memory_and_are_not_copied() -> None:
    """AccumulateGrad takes a detached tensor over; one that is also held elsewhere it would copy, weight-sized."""
    start_megatron(1)
    layer = build_layer("mok", make_config())
    for parameter in layer.experts.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
        parameter.grad_added_to_main_grad = False
    layer(tokens((6, 1, 64), 1).requires_grad_(True))[0].sum().backward()
    for name, parameter in layer.experts.named_parameters():
        dummy = gradients._dummies[parameter.shape, parameter.dtype, parameter.device]
        assert parameter.grad.data_ptr() == dummy.data_ptr(), name


def test_a_wrapper_that_does_not_know_the_flag_is_given_no_dummy() -> None:
    start_megatron(1)
    layer = build_layer("mok", make_config())
    for parameter in layer.experts.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    layer(tokens((6, 1, 64), 1).requires_grad_(True))[0].sum().backward()
    for name, parameter in layer.experts.named_parameters():
        assert parameter.grad is None, name
    assert all(bool(p.main_grad.any()) for n, p in layer.experts.named_parameters() if "linear_fc2" in n)


def test_experts_of_one_layer_that_differ() -> None:
    """Expert 0 frozen, 1 without main_grad, 2 with a dummy that is added after all, 3 under a wrapper that does not know the flag."""
    start_megatron(1)
    x, dy = tokens((16, 1, 64), 1), tokens((16, 1, 64), 2)
    expected = helpers.run_layer(build_layer("mok", make_config()), x, dy)
    layer = build_layer("mok", make_config())
    frozen, plain, zeroed, unknown = (list(expert.parameters()) for expert in layer.experts.local_experts)
    for parameter in frozen:
        parameter.requires_grad_(False)
    for parameter in [*zeroed, *unknown]:
        parameter.main_grad = torch.full_like(parameter, 7.0)
    for parameter in zeroed:
        parameter.grad_added_to_main_grad = False
        parameter.zero_out_wgrad = parameter.overwrite_main_grad = True
        gradients._dummies[parameter.shape, parameter.dtype, parameter.device] = torch.full_like(parameter, 12345.0)
    layer(x.clone().requires_grad_(True))[0].backward(dy)
    assert all(p.grad is None for p in [*frozen, *unknown])
    assert all(p.grad_added_to_main_grad and not p.grad.any() for p in zeroed)
    for fc in (1, 2):
        _, one, two, three = (expected[f"experts.local_experts.{expert}.linear_fc{fc}.weight"] for expert in range(4))
        assert torch.equal(plain[fc - 1].grad, one)
        assert torch.equal(zeroed[fc - 1].main_grad, two)
        assert torch.equal(unknown[fc - 1].main_grad, three + 7.0)


def test_gradient_accumulation_fusion_changes_nothing() -> None:
    start_megatron(1)
    runs = [(tokens((16, 1, 64), 1), tokens((16, 1, 64), 2))]
    off = microbatches(wrap("mok"), runs)
    fused = wrap("mok")
    fused.module.config.gradient_accumulation_fusion = True
    for name, gradient in microbatches(fused, runs).items():
        assert torch.equal(gradient, off[name]), name


def same_batch(rank: int, ep_size: int) -> dict[str, Tensor]:
    """B-T5: gradients of a global batch of 8 tokens, mean loss, under DDP and after its reduction."""
    start_megatron(ep_size)
    found = {}
    for backend in ("mok", "alltoall"):
        model = wrap(backend, ep_size, ddp=OVERLAP)
        share = 8 // ep_size
        x, dy = (tokens((8, 1, 64), seed)[rank * share : (rank + 1) * share] for seed in (1, 2))
        grads = microbatches(model, [(x, dy / share)])
        found[backend] = {name: gradient for name, gradient in grads.items()}
    for name, gradient in found["alltoall"].items():
        torch.testing.assert_close(found["mok"][name], gradient, rtol=1e-5, atol=1e-6)
    return found["mok"]


def test_b_t5_expert_gradients_do_not_scale_with_ep(ranks2: RankPool) -> None:
    start_megatron(1)
    alone = same_batch(0, 1)
    together: dict[str, Tensor] = {}
    for found in ranks2.run(same_batch, 2, timeout=120):
        together |= found
    assert together.keys() == alone.keys()
    for name, gradient in alone.items():
        torch.testing.assert_close(together[name], gradient, rtol=1e-5, atol=1e-6)


def test_b_t5_router_gradient_equals_central_differences() -> None:
    """Auxiliary coefficient 0: nothing else gives the router a gradient."""
    start_megatron(1)
    layer = build_layer("mok", make_config())
    x, dy = tokens((8, 1, 64), 1), tokens((8, 1, 64), 2)
    gradient = helpers.run_layer(layer, x, dy)["router.weight"]
    assert bool((gradient != 0).any(dim=1).all())
    weight = layer.router.weight

    def loss() -> float:
        with torch.no_grad():
            return float((layer(x)[0].double() * dy.double()).sum())

    step = 2e-3
    for position in ((0, 3), (1, 17), (2, 40), (3, 63)):
        with torch.no_grad():
            weight[position] += step
            above = loss()
            weight[position] -= 2 * step
            below = loss()
            weight[position] += step
        slope = (above - below) / (2 * step)
        assert slope == pytest.approx(float(gradient[position]), rel=2e-2, abs=1e-4), position
