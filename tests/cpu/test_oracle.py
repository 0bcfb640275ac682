"""The oracle is right (against central differences), and its bound is neither too tight nor too loose (planted mistakes)."""

from __future__ import annotations

import pytest
import torch

from tests.cpu.emulation import MISTAKES, emulate
from tests.oracle import Bounded, moe_oracle, worst_ratio

OUTPUTS = ("y", "dx", "d_router_weights", "dw13", "dw2")
# Outputs in which each mistake must show. The others may or may not be touched by it.
SHOWS_IN = {
    "gate_up_swapped": OUTPUTS,
    "route_dropped": ("y", "dx", "dw13", "dw2"),  # the one lost d_router_weight may happen to be small
    "p_applied_twice": ("y", "dw2"),
    "p_missing": ("y", "dw2"),
    "last_k_column_missing_in_gemm1": OUTPUTS,
    "last_k_column_missing_in_gemm2": ("y",),
    "row_off_by_one_in_one_expert": OUTPUTS,
    "silu_slope_without_sigmoid_term": ("dx", "dw13"),
    "dx_without_up_part": ("dx",),
    "d_p_divided_by_p": ("d_router_weights",),
    "wgrad_misses_last_row": ("dw13", "dw2"),
    "p_missing_in_dgate": ("dx", "dw13"),
    "slots_summed_twice": ("y",),
}


def _inputs(seed: int, dtype: torch.dtype, hidden: int, inter: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, experts, topk = 96, 8, 3
    order = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :topk].sort(1).values
    order[torch.rand(tokens, topk, generator=generator) < 0.1] = -1

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    return {
        "x": normal(tokens, hidden),
        "router_weights": torch.rand(tokens, topk, generator=generator) * 0.9 + 0.1,  # a dropped route of weight 0 is no mistake
        "topk_experts": order,
        "w13": normal(experts, 2 * inter, hidden, scale=hidden**-0.5),
        "w2": normal(experts, hidden, inter, scale=inter**-0.5),
        "dy": normal(tokens, hidden),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("hidden", "inter"), [(64, 64), (128, 192)])
def test_bound_holds_for_the_right_roundings(seed: int, dtype: torch.dtype, hidden: int, inter: int) -> None:
    inputs = _inputs(seed, dtype, hidden, inter)
    want, got = moe_oracle(**inputs, dtype=dtype), emulate(**inputs)
    ratios = {name: worst_ratio(got[name], getattr(want, name)) for name in OUTPUTS}
    assert max(ratios.values()) <= 1.0, ratios
    # Nor is it a bound for something far larger: a correct executor uses up a visible part of it in every output. (fp32 less than
    # bf16: a worst case over some hundred thousand roundings is further from what happens than one over a thousand.)
    assert min(ratios.values()) > (0.05 if dtype == torch.bfloat16 else 0.003), ratios


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_bound_catches_a_planted_mistake(seed: int, dtype: torch.dtype, mistake: str) -> None:
    inputs = _inputs(seed, dtype, 64, 64)
    want, got = moe_oracle(**inputs, dtype=dtype), emulate(**inputs, mistake=mistake)
    for name in SHOWS_IN[mistake]:
        assert worst_ratio(got[name], getattr(want, name)) > 1.5, (mistake, name)


def test_a_wrong_rounding_order_shows_in_fp32_but_rounding_alone_never_does(seed: int) -> None:
    """bf16 results are far outside the fp32 bound: the dtype part is not used where it does not belong."""
    inputs = _inputs(seed, torch.bfloat16, 64, 64)
    want, got = moe_oracle(**inputs, dtype=torch.float32), emulate(**inputs)
    assert worst_ratio(got["y"], want.y) > 100


def test_gradients_equal_central_differences(seed: int) -> None:
    inputs = _inputs(seed, torch.float32, 64, 64)
    want = moe_oracle(**inputs, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    step = 1e-5
    pairs = {"x": "dx", "router_weights": "d_router_weights", "w13": "dw13", "w2": "dw2"}
    forward = {k: v for k, v in inputs.items() if k != "dy"}
    for name, gradient in pairs.items():
        direction = torch.randn(inputs[name].shape, generator=generator, dtype=torch.float64)
        losses = []
        for sign in (1.0, -1.0):
            moved = dict(forward, **{name: inputs[name].double() + sign * step * direction})
            y = moe_oracle(**moved, dtype=torch.float32).y.value
            losses.append(float((y * inputs["dy"].double()).sum()))
        numeric = (losses[0] - losses[1]) / (2 * step)
        analytic = float((getattr(want, gradient).value * direction).sum())
        assert numeric == pytest.approx(analytic, rel=1e-6, abs=1e-6), name


def test_missing_routes_give_exact_zeros_and_counts(seed: int) -> None:
    inputs = _inputs(seed, torch.float32, 64, 64)
    want = moe_oracle(**inputs, dtype=torch.float32)
    absent = inputs["topk_experts"] < 0
    assert bool((want.d_router_weights.value[absent] == 0).all()) and bool(absent.any())
    assert int(want.counts.sum()) == int((~absent).sum())


def test_worst_ratio_is_strict() -> None:
    want = Bounded(torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([0.5, 0.0], dtype=torch.float64))
    assert worst_ratio(torch.tensor([1.25, 0.0]), want) == 0.5
    for bad in ([1.0, 1e-30], [float("nan"), 0.0], [float("inf"), 0.0]):
        assert worst_ratio(torch.tensor(bad), want) > 1
