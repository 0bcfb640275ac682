"""Expert load (F-T2)."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mok_megatron.megatron import install, metrics
from tests.distributed import RankPool
from tests.megatron.helpers import build_layer, make_config, start_megatron, tokens


def route_to(layer: Any, counts: list[int], topk: int) -> torch.Tensor:
    """Makes the router send ``counts[e]`` routes to expert e; the tokens that this takes, the rest of the slots empty."""
    number = max(*counts, -(-sum(counts) // topk))
    routing_map = torch.zeros(number, len(counts), dtype=torch.bool)
    start = 0
    for expert, count in enumerate(counts):
        routing_map[(start + torch.arange(count)) % number, expert] = True
        start += count
    probs = routing_map.float() / topk
    layer.router.forward = lambda x, mask=None: (probs[: x.shape[0]], routing_map[: x.shape[0]])
    return tokens((number, 1, 64), 1)


def step(layer: Any, x: torch.Tensor) -> None:
    """Forward and backward."""
    layer(x.clone().requires_grad_(True))[0].sum().backward()


@pytest.fixture(autouse=True)
def no_counters() -> None:
    metrics._counters.clear()


def test_f_t2_numbers() -> None:
    summary = metrics.LoadSummary(3, (10, 0, 6, 0))
    assert summary.routes == 16
    assert summary.max_over_mean == 2.5
    assert summary.dead_experts == 2
    assert summary.standard_deviation == pytest.approx(4.243, abs=5e-4)
    assert metrics.LoadSummary(1, (0, 0)).max_over_mean == 0.0


def test_f_t2_layers_and_percentiles() -> None:
    start_megatron(1)
    layers = [build_layer("mok", make_config(), layer_number=i, log_expert_load=True) for i in (2, 1, 3)]
    for layer, counts in zip(layers, ([10, 0, 6, 0], [4, 4, 4, 4], [8, 0, 4, 4]), strict=True):
        step(layer, route_to(layer, counts, 2))
    report = metrics.collect()
    assert [s.layer for s in report.layers] == [1, 2, 3]
    assert [s.max_over_mean for s in report.layers] == [1.0, 2.5, 2.0]
    assert report.layers[1].counts == (10, 0, 6, 0)
    assert report.percentile(50) == 2.0
    assert report.percentile(100) == 2.5
    assert report.percentile(75) == 2.25
    text = "\n".join(report.lines())
    assert "layer 2: max/mean 2.500, dead experts 2, std 4.243, routes 16" in text
    assert "over 3 layers: max/mean p50 2.000, p90 2.400, max 2.500" in text
    assert metrics.collect().layers[1].counts == (0, 0, 0, 0), "collecting starts anew"


def test_f_t2_recomputation_and_evaluation_are_not_counted() -> None:
    start_megatron(1)
    config = make_config(recompute_granularity="selective", recompute_modules=["moe"])
    layer = build_layer("mok", config, log_expert_load=True)
    x = route_to(layer, [10, 0, 6, 0], 2)
    step(layer, x)
    with torch.no_grad():
        layer.eval()
        layer(x)
    assert metrics.collect(reset=False).layers[0].counts == (10, 0, 6, 0)
    layer.train()
    step(layer, x)
    assert metrics.collect().layers[0].counts == (20, 0, 12, 0)


def test_f_t2_pads_are_excluded() -> None:
    start_megatron(1)
    layer = build_layer("mok", make_config(), log_expert_load=True)
    mask = torch.zeros(1, 12, dtype=torch.bool)
    mask[0, 9:] = True
    layer(tokens((12, 1, 64), 1), padding_mask=mask)
    assert metrics.collect().layers[0].routes == 18


def test_f_t2_counts_are_integers_beyond_every_float_format() -> None:
    counter = metrics.LoadCounter(None, None)
    counter.add(1, torch.tensor([2**30, 40_840], dtype=torch.int32))
    for _ in range(7):
        counter.add(1, torch.tensor([2**30, 1], dtype=torch.int32))
    assert metrics.collect().layers[0].counts == (2**33, 40_847)


def test_f_t2_off_means_nothing_is_kept() -> None:
    start_megatron(1)
    layer = build_layer("mok", make_config())
    layer(tokens((4, 1, 64), 1))
    assert layer._mok_load is None
    assert metrics.collect().layers == ()


def test_f_t2_layers_of_one_number_stay_apart() -> None:
    """MTP layers count from 1 again."""
    counters = [metrics.LoadCounter(None, None) for _ in range(3)]
    for index, counter in enumerate(counters):
        counter.add(1, torch.tensor([index, 1]))
    assert [s.counts for s in metrics.collect().layers] == [(0, 1), (1, 1), (2, 1)]


def layer_and_arguments(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> tuple[Any, torch.Tensor, Namespace]:
    """A layer that counts, tokens for it, and the training arguments that the log sees."""
    start_megatron(1)
    layer = build_layer("mok", make_config(), log_expert_load=True)
    args = Namespace(log_interval=2, **arguments)
    monkeypatch.setattr(install.compat, "training_args", lambda: args)
    return layer, route_to(layer, [10, 0, 6, 0], 2), args


def test_f_t2_the_log_interval(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    layer, x, args = layer_and_arguments(monkeypatch, mok_log_expert_load=True)
    logged: list[int] = []

    def training_log(loss_dict: Any, iteration: int, report: bool = False) -> str:
        logged.append(iteration)
        return "as before"

    wrapped = install._log_load_too(training_log)
    for iteration in (1, 2, 3):
        step(layer, x)
        assert wrapped({}, iteration, report=True) == "as before"
    said = [line for line in capsys.readouterr().out.splitlines() if "expert load" in line]
    assert logged == [1, 2, 3]
    assert said[0].startswith("mok_megatron: iteration 2: expert load, layer 1: max/mean 2.500") and "routes 32" in said[0]
    assert len(said) == 2
    args.mok_log_expert_load = False
    wrapped({}, 4)
    assert "expert load" not in capsys.readouterr().out


def test_the_log_interval_behind_a_wrapper_without_names(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    layer, x, args = layer_and_arguments(monkeypatch, mok_log_expert_load=False)
    wrapped = install._log_load_too(lambda *args, **kwargs: "as before")
    assert wrapped({}, 7) == "as before"
    args.mok_log_expert_load = True
    for finished in (0, 1, 2):
        args.curr_iteration = finished
        step(layer, x)
        assert wrapped({}, finished + 1) == "as before"
    assert [line.split(":")[1] for line in capsys.readouterr().out.splitlines() if "expert load, layer" in line] == [" iteration 2"]


def gathered(rank: int) -> tuple[tuple[int, ...], int]:
    """Counts over two ranks, and collectives that the forward passes made on their way."""
    start_megatron(2)
    metrics._counters.clear()
    layer = build_layer("mok", make_config(2), log_expert_load=True)
    x = route_to(layer, [(10, 0, 6, 0), (1, 2, 0, 0)][rank], 2)
    layer(x)  # the workspace is made
    metrics.collect()
    calls = []
    originals = {name: getattr(dist, name) for name in ("all_reduce", "all_gather", "all_to_all_single", "broadcast")}
    try:
        for name in originals:
            setattr(dist, name, lambda *a, **k: calls.append(a))
        layer(x)
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)
    return metrics.collect().layers[0].counts, len(calls)


def test_f_t2_over_ranks_without_extra_communication(ranks2: RankPool) -> None:
    assert ranks2.run(gathered, timeout=120) == [((11, 2, 6, 0), 0)] * 2
