"""Rows of the benchmark: right ones on every workload, planted wrong ones are found, libraries that are absent here against stand-ins."""

from __future__ import annotations

import dataclasses
import sys
import types
from typing import Any

import pytest
import torch

from mok_megatron.bench import gradients, oracle
from mok_megatron.bench.layer import measure
from mok_megatron.bench.phases import BACKWARD, FORWARD, FORWARD_BACKWARD, PHASES
from mok_megatron.bench.problem import LayerProblem, Ranks, make_problem
from mok_megatron.bench.rows import COMPETITORS
from mok_megatron.bench.rows.experts import GatherSums, Place, SpreadRows, Take, sum_rows, swiglu, swiglu_grads
from mok_megatron.bench.workloads import WORKLOADS
from mok_megatron.config import MoKConfig
from tests.cpu import bench_helpers
from tests.cpu.bench_helpers import CPU, small_problem
from tests.cpu.emulation import MISTAKES, emulate
from tests.distributed import RankPool
from tests.oracle import moe_oracle

_FORWARD_ONLY = {"mok_context", "mok_schedule"}
_BOTH_WAYS = {"mok", "nccl", "bare"}


@pytest.mark.parametrize("workload", WORKLOADS)
def test_rows_are_right_on_every_workload(ranks2: RankPool, workload: str) -> None:
    for ep_size, statuses in ((1, [bench_helpers.all_rows(0, 1, workload, 24)]), (2, ranks2.run(bench_helpers.all_rows, 2, workload, 24))):
        for status in statuses:
            both = _BOTH_WAYS | ({"mok_ep1"} if ep_size > 1 else set())
            good = {(name, FORWARD) for name in both | _FORWARD_ONLY}
            good |= {(name, phase) for name in both | {"mok_bf16grad"} for phase in (FORWARD_BACKWARD, BACKWARD)}
            assert {key for key, text in status.items() if text == "ok"} == good, status
            for name, module in (
                ("hybridep", "deep_ep"),
                ("deepep", "deep_ep"),
                ("sonicmoe", "sonicmoe"),
                ("ligercute", "liger_cute_kernels"),
            ):
                assert status[name, FORWARD] == f"skipped: not installed ({module})"


def test_rows_are_right_where_a_rank_gets_none(ranks2: RankPool) -> None:
    for status in ranks2.run(bench_helpers.idle_rank, 2):
        assert len(status) == 15 and set(status.values()) == {"ok"}, status


def test_a_rank_may_bring_no_tokens() -> None:
    lengths = [len(table) for table in small_problem(Ranks(0, 8, CPU), "ragged").routes]
    mine = small_problem(Ranks(lengths.index(0), 8, CPU), "ragged")
    assert mine.x.shape == mine.dy.shape == (0, 128) and mine.router_weights.shape == (0, 3)


@pytest.mark.parametrize("ep_size", [1, 2])
def test_planted_faults_are_reported_and_not_timed(ranks2: RankPool, ep_size: int) -> None:
    everyone = [bench_helpers.planted(0, 1)] if ep_size == 1 else ranks2.run(bench_helpers.planted, 2)
    for results in everyone:
        last = ep_size - 1
        status, reason, readings = results["lost_route", FORWARD]
        assert (status, readings) == ("wrong", 0)
        assert f"rank {last}: 1 of 40 sampled rows outside, row 0 worst" in reason
        for phase, text in ((FORWARD_BACKWARD, "y: 1 of 40 sampled rows outside, row 0 worst"), (BACKWARD, " sampled rows outside")):
            status, reason, readings = results["lost_route", phase]
            assert (status, readings) == ("wrong", 0) and reason.startswith(f"rank {last}: ") and text in reason
        status, reason, readings = results["spoilt_later", FORWARD]
        assert (status, readings) == ("wrong", 0)
        assert "1 of 5120 elements are not finite after the timing" in reason
        status, reason, readings = results["late_backward", BACKWARD]
        assert (status, readings) == ("wrong", 0)
        assert f"rank {last}: dw2: 4 of " in reason and reason.endswith("after the timing")
        for phase in (FORWARD, FORWARD_BACKWARD):
            assert results["late_backward", phase] == ("ok", None, 2)
        status, reason, readings = results["raising", FORWARD]
        assert (status, readings) == ("failed", 0)
        assert "RuntimeError: no such kernel" in reason and (ep_size == 1 or "rank 1" in reason)
        status, reason, readings = results["half", FORWARD]
        assert (status, readings) == ("wrong", 0)
        assert "[20, 128]" in reason and "[40, 128]" in reason
        for key in [(name, phase) for name in _BOTH_WAYS for phase in PHASES] + [("mok_schedule", FORWARD)]:
            assert results[key] == ("ok", None, 2)


@pytest.mark.parametrize(("ep_size", "light"), [(1, False), (2, False), (2, True)])
def test_the_busiest_rank_replays_one_macrobatch(ranks2: RankPool, ep_size: int, light: bool) -> None:
    everyone = [bench_helpers.replayed(0, 1, light)] if ep_size == 1 else ranks2.run(bench_helpers.replayed, 2, light)
    _, _, made, sizes = everyone[0]
    rows = [rank_rows for _, rank_rows, _, _ in everyone]
    assert max(rows) == sizes.rows == sizes.recomputed_rows + sizes.replayed_rows
    assert made == (128, 128, sizes.halved_macrobatch_size) and -(-max(rows) // made[2]) == 2
    assert not light or rows[1] == 128 < made[2] == 384
    last = ep_size - 1
    fault = f"wrong: rank {last}: gate_up: 1 of {min(rows[last], made[2])} rows differ from those that the forward keeps"
    good = ["mok", "mok_replay", "mok_repeated", *(["mok_ep1"] if ep_size > 1 else [])]
    for statuses, _, same, foreseen in everyone:
        assert (same, foreseen) == (made, sizes)
        assert statuses == {**{(name, BACKWARD): "ok" for name in good}, ("one_bit_off", BACKWARD): fault}


def test_a_replay_needs_two_minibatches_and_a_mok_that_replays_nothing() -> None:
    problem = small_problem(Ranks(0, 1, CPU))  # 512 rows, all in the minibatch that the rule gives
    results = measure(problem, [COMPETITORS["mok_replay"]], bench_helpers.CountingClock(), iterations=1, warmup=0)
    assert {(key, result.status) for key, result in results.items()} == {
        (("mok_replay", BACKWARD), "skipped"),
        (("mok_repeated", BACKWARD), "skipped"),
    }
    assert "512 rows are one minibatch of 640" in results["mok_replay", BACKWARD].reason
    for minibatch, macrobatch, reason in (
        (256, None, None),
        (512, None, "512 rows are one minibatch of 512"),
        (128, 512, None),
        (128, 384, "512 rows are more than MoK's own macrobatch of 384"),
    ):
        shape = dataclasses.replace(problem.shape, config=MoKConfig(minibatch_size=minibatch, macrobatch_size=macrobatch))
        found = COMPETITORS["mok_replay"].unavailable(dataclasses.replace(problem, shape=shape))
        assert found is None if reason is None else reason in found


def test_a_replay_has_mok_s_minibatch() -> None:
    """The rule's for a macrobatch of 34 blocks: 2. For one of 16 it would be 16."""
    shape = dataclasses.replace(bench_helpers.SHAPE, config=MoKConfig(macrobatch_size=34 * 128))
    problem = make_problem(shape, Ranks(0, 1, CPU), "balanced", tokens=1300, seed=7)
    mok, replay = (COMPETITORS[name](problem).workspace for name in ("mok", "mok_replay"))
    assert mok.minibatch_size == replay.minibatch_size == 2 * 128 and replay.macrobatch_size == 16 * 128


def test_bare_row_is_judged_too() -> None:
    problem = small_problem(Ranks(0, 1, CPU))
    row = COMPETITORS["bare"](problem)
    reference = oracle.make_reference(problem)
    assert row.verify(reference).fault is None
    row._ends = row._ends.roll(1)
    assert row.verify(reference).fault is not None


def _gradient_reference(problem: LayerProblem) -> gradients.GradientReference:
    return gradients.make_reference(problem, oracle.make_reference(problem))


def test_gradient_reference_equals_the_test_oracle() -> None:
    problem = small_problem(Ranks(0, 1, CPU), tokens=oracle.SAMPLE_TOKENS + 30)
    reference = _gradient_reference(problem)
    operands = (problem.x, problem.router_weights, problem.topk_experts, problem.w13, problem.w2, problem.dy)
    wanted = moe_oracle(*operands, dtype=torch.bfloat16)
    tokens, sample = reference.forward.tokens, reference.sample
    assert len(sample.experts) == 2 and len(sample.channels.unique()) == gradients.SAMPLE_CHANNELS
    weights = sample.read(wanted.dw13.value, wanted.dw2.value)
    pairs = {
        "dx": (reference.dx, wanted.dx.value[tokens]),
        "d_p": (reference.d_router_weights, wanted.d_router_weights.value[tokens].reshape(-1, 1)),
        "dw13": (reference.dw13, weights[0]),
        "dw2": (reference.dw2, weights[1]),
    }
    for (value, scale), right in pairs.values():
        torch.testing.assert_close(value, right, rtol=1e-12, atol=1e-11)
        assert scale.shape == (len(right),) and bool((scale > 0).all())


def _emulated(problem: LayerProblem, mistake: str | None = None) -> gradients.Gradients:
    operands = (problem.x, problem.router_weights, problem.topk_experts, problem.w13, problem.w2, problem.dy)
    found = emulate(*operands, mistake=mistake)
    return gradients.Gradients(*(found[name] for name in ("dx", "d_router_weights", "dw13", "dw2")))


def test_right_gradients_use_a_visible_part_of_the_tolerance() -> None:
    problem = small_problem(Ranks(0, 1, CPU), tokens=96)
    verdict = gradients.judge(problem, _gradient_reference(problem), _emulated(problem))
    assert verdict.fault is None and 0.2 < verdict.error / verdict.tolerance < 0.8


@pytest.mark.parametrize("mistake", [m for m in MISTAKES if m not in ("last_k_column_missing_in_gemm2", "slots_summed_twice")])
def test_wrong_gradients_are_found(mistake: str) -> None:
    problem = small_problem(Ranks(0, 1, CPU), tokens=96)
    assert gradients.judge(problem, _gradient_reference(problem), _emulated(problem, mistake)).fault is not None


def test_weight_gradients_of_every_sampled_matrix_count() -> None:
    problem = small_problem(Ranks(0, 1, CPU))
    reference, right = _gradient_reference(problem), _emulated(problem)
    for name in ("dw13", "dw2"):
        for expert in reference.sample.experts:
            wrong = getattr(right, name).clone()
            wrong[expert] *= 1.03
            verdict = gradients.judge(problem, reference, dataclasses.replace(right, **{name: wrong}))
            assert verdict.fault is not None and verdict.fault.startswith(f"{name}: 4 of ")
        holed = getattr(right, name).clone()
        holed[0, 1, 1] = float("nan")  # no expert of the sample need be touched
        verdict = gradients.judge(problem, reference, dataclasses.replace(right, **{name: holed}))
        assert verdict.fault == f"{name}: 1 of {holed.numel()} elements are not finite"


def test_shapes_and_dtypes_of_gradients_count() -> None:
    problem = small_problem(Ranks(0, 1, CPU))
    reference, right = _gradient_reference(problem), _emulated(problem)
    wide = dataclasses.replace(right, dw2=right.dw2.float())
    assert "dw2 is [4, 128, 192] torch.float32" in gradients.judge(problem, reference, wide).fault
    turned = dataclasses.replace(right, dw13=right.dw13.transpose(1, 2))
    assert "must be [4, 384, 128] torch.bfloat16" in gradients.judge(problem, reference, turned).fault


class _OverwritingRow(COMPETITORS["mok"]):
    """Writes over main_grad where it should add."""

    def _backward(self, schedule: Any, context: Any) -> gradients.Gradients:
        for main_grad in self.problem.main_grad.tensors():
            main_grad.zero_()
        return super()._backward(schedule, context)


class _UnsteadyGradientRow(COMPETITORS["mok"]):
    """Right, but not the same bits twice."""

    calls = 0

    def backward(self) -> gradients.Gradients:
        self.calls += 1
        found = super().backward()
        found.dx[2, 3] *= 1.0 if self.calls % 2 else 1.0 + 2.0**-7
        return found


def test_mok_must_add_to_main_grad_and_give_the_same_bits_twice() -> None:
    problem = small_problem(Ranks(0, 1, CPU))
    reference = _gradient_reference(problem)
    right, overwriting, unsteady = (row(problem) for row in (COMPETITORS["mok"], _OverwritingRow, _UnsteadyGradientRow))
    for row in (right, overwriting, unsteady):
        row.begin()
    for phase in (FORWARD_BACKWARD, BACKWARD):
        assert right.verify_gradients(phase, reference).fault is None
        assert "dw" in overwriting.verify_gradients(phase, reference).fault
    verdict = unsteady.verify_gradients(BACKWARD, reference)
    assert verdict.error <= verdict.tolerance and verdict.fault == "1 elements of the gradients differ between two runs"


def test_experts_without_rows_get_exact_zeros() -> None:
    problem = small_problem(Ranks(0, 1, CPU), tokens=1)  # three of four experts
    reference = _gradient_reference(problem)
    idle = problem.local_expert_rows().index(0)
    assert idle in reference.sample.experts
    for name in ("mok", "mok_bf16grad", "nccl", "bare"):
        row = COMPETITORS[name](problem)
        row.begin()
        assert row.verify_gradients(BACKWARD, reference).fault is None
    right = _emulated(problem)
    right.dw13[idle] += 2.0**-30
    assert gradients.judge(problem, reference, right).fault is not None


def test_bare_gradients_are_judged_too() -> None:
    problem = small_problem(Ranks(0, 1, CPU))
    reference = _gradient_reference(problem)
    row = COMPETITORS["bare"](problem)
    for index, name in ((0, "dgrad"), (1, "dgrad"), (2, "dw2"), (3, "dw13")):
        for phase in (FORWARD_BACKWARD, BACKWARD):
            assert row.verify_gradients(phase, reference).fault is None
        right = row.backward()
        wrong = [product.clone() for product in right]
        wrong[index] *= 1.02
        row.backward = lambda wrong=wrong: tuple(wrong)
        verdict = row.verify_gradients(BACKWARD, reference)
        assert verdict.fault is not None and verdict.fault.startswith(name)
        del row.backward


class _UnsteadyRow(COMPETITORS["mok"]):
    calls = 0

    def forward(self) -> torch.Tensor:
        self.calls += 1
        y = super().forward()
        y[2, 3] *= 1.0 if self.calls % 2 else 1.0 + 2.0**-7
        return y


def test_mok_must_give_the_same_bits_twice() -> None:
    problem = small_problem(Ranks(0, 1, CPU))
    reference = oracle.make_reference(problem)
    assert COMPETITORS["mok"](problem).verify(reference).fault is None
    verdict = _UnsteadyRow(problem).verify(reference)
    assert verdict.error <= verdict.tolerance and verdict.fault == "1 of 5120 elements differ between two runs"


def test_reference_equals_the_test_oracle() -> None:
    problem = small_problem(Ranks(0, 1, CPU), tokens=oracle.SAMPLE_TOKENS + 30)
    reference = oracle.make_reference(problem)
    assert len(reference.tokens) == oracle.SAMPLE_TOKENS == len(reference.tokens.unique())
    assert {0, problem.x.shape[0] - 1} <= set(reference.tokens.tolist())
    wanted = moe_oracle(problem.x, problem.router_weights, problem.topk_experts, problem.w13, problem.w2, dtype=torch.bfloat16)
    torch.testing.assert_close(reference.value, wanted.y.value[reference.tokens], rtol=1e-12, atol=1e-12)


def test_a_router_weight_off_by_five_per_cent_is_wrong() -> None:
    problem = small_problem(Ranks(0, 1, CPU))
    reference = oracle.make_reference(problem)
    row = COMPETITORS["nccl"](problem)
    assert row.verify(reference).fault is None
    problem.router_weights[7] *= 1.05
    verdict = row.verify(reference)
    assert verdict.fault is not None and "row 7 worst" in verdict.fault


def test_alone_has_the_same_rows_of_every_expert() -> None:
    problem = small_problem(Ranks(1, 4, CPU, None, None), "zipf_1.5")
    alone = problem.alone()
    assert alone.local_expert_rows() == problem.local_expert_rows()
    for routes in alone.topk_experts.tolist():
        taken = [route for route in routes if route >= 0]
        assert taken == sorted(set(taken)) and routes[: len(taken)] == taken
    assert alone.w13 is problem.w13 and alone.w2 is problem.w2


def test_fused_pieces_against_plain_formulas(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(9, 8, generator=generator).bfloat16()
    places = torch.tensor([[0, 8, -1], [-1, -1, -1], [3, 3, 4]])
    wanted = torch.stack([rows[0].double() + rows[8].double(), torch.zeros(8), 2 * rows[3].double() + rows[4].double()])
    torch.testing.assert_close(sum_rows(rows, places).double(), wanted, rtol=2**-8, atol=1e-30)
    gate_up, p = torch.randn(5, 12, generator=generator).bfloat16(), torch.rand(5, generator=generator)
    gate, up = gate_up.double().chunk(2, dim=1)
    torch.testing.assert_close(swiglu(gate_up, p).double(), gate * gate.sigmoid() * up * p[:, None], rtol=2**-8, atol=1e-6)
    dh = torch.randn(5, 6, generator=generator).bfloat16()
    exact_gate_up, exact_p = gate_up.double().requires_grad_(), p.double().requires_grad_()
    gate, up = exact_gate_up.chunk(2, dim=1)
    wanted = torch.autograd.grad(gate * gate.sigmoid() * up * exact_p[:, None], (exact_gate_up, exact_p), dh.double())
    for got, right, rtol in zip(swiglu_grads(gate_up, p, dh), wanted, (2**-8, 1e-5), strict=True):
        torch.testing.assert_close(got.double(), right, rtol=rtol, atol=1e-5)


def test_moves_of_rows_have_the_gradients_of_plain_indexing(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    places = torch.randperm(12, generator=generator).view(4, 3)
    tokens = torch.empty(12, dtype=torch.int64).scatter_(0, places.view(-1), torch.arange(12) // 3)
    order = torch.randperm(12, generator=generator)
    some = order[:7]

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).requires_grad_()

    for function, plain, values in (
        (lambda v: SpreadRows.apply(v, tokens, places), lambda v: v[tokens], normal(4, 8)),
        (lambda v: GatherSums.apply(v, tokens, places), lambda v: v[places].sum(1), normal(12, 8)),
        (lambda v: Take.apply(v, order), lambda v: v[order], normal(12)),
        (lambda v: Take.apply(v, some), lambda v: v[some], normal(12, 8)),
        (lambda v: Place.apply(v, order), lambda v: v[order.argsort()], normal(12, 8)),
    ):
        got, wanted = function(values), plain(values)
        torch.testing.assert_close(got, wanted)
        dy = torch.randn(got.shape, generator=generator)
        torch.testing.assert_close(torch.autograd.grad(got, values, dy), torch.autograd.grad(wanted, values, dy))


def _stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(members)
    monkeypatch.setitem(sys.modules, name, module)


def _judged(name: str, problem: LayerProblem) -> oracle.Verdict:
    return COMPETITORS[name](problem).verify(oracle.make_reference(problem))


def _judged_gradients(name: str, problem: LayerProblem) -> None:
    """Both phases with a backward are right, the backward alone as often as it is called."""
    row, reference = COMPETITORS[name](problem), _gradient_reference(problem)
    row.begin()
    for phase in (FORWARD_BACKWARD, BACKWARD, BACKWARD):
        verdict = row.verify_gradients(phase, reference)
        assert verdict.fault is None, verdict


class _DeepEP:
    """What ``deep_ep.Buffer`` does among one rank, with routes of the second half of the experts going elsewhere and giving nothing back."""

    def __init__(self, group: Any, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        assert num_nvl_bytes == 256 and num_rdma_bytes == 0

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Any:
        return types.SimpleNamespace(get_nvl_buffer_size_hint=lambda row_bytes, num_ranks: row_bytes)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, ids: torch.Tensor, num_experts: int) -> tuple[Any, ...]:
        return None, None, torch.bincount(ids[ids >= 0], minlength=num_experts), torch.ones(len(ids), 1, dtype=torch.bool), None

    def dispatch(self, x: torch.Tensor, handle: str | None = None, **arguments: Any) -> tuple[Any, ...]:
        if handle is not None:
            assert handle == "handle" and not arguments
            return x, None, None, None, None, None
        ids = arguments["topk_idx"]
        assert ids.dtype == torch.int64
        counts = arguments["num_tokens_per_expert"].tolist()
        keep = (ids >= 0) & (ids < 2)
        return x, torch.where(keep, ids, -1), arguments["topk_weights"].where(keep, 0.0), [*counts[:2], 0, 0], "handle", None

    def combine(self, x: torch.Tensor, handle: str, topk_weights: torch.Tensor | None = None) -> tuple[Any, ...]:
        assert handle == "handle"
        return x, topk_weights, None


def test_deepep_row_against_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    _stand_in(monkeypatch, "deep_ep", Buffer=_DeepEP)
    problem = small_problem(Ranks(0, 1, CPU))
    y = COMPETITORS["deepep"](problem).forward()
    problem.router_weights[problem.topk_experts >= 2] = 0.0  # what the stand-in keeps to itself
    assert oracle.judge(problem, oracle.make_reference(problem), y).fault is None
    problem.topk_experts[problem.topk_experts >= 2] = -1
    problem.routes[0].copy_(problem.topk_experts)
    row, reference = COMPETITORS["deepep"](problem), _gradient_reference(problem)
    row.begin()
    for phase in (FORWARD_BACKWARD, BACKWARD, BACKWARD):
        verdict = row.verify_gradients(phase, reference)
        assert verdict.fault is None, verdict


class _HybridEP:
    def __init__(self, **arguments: Any) -> None:
        assert arguments["max_num_of_tokens_per_rank"] >= 512 and arguments["num_local_experts"] == 4

    def dispatch_with_permute(
        self,
        *,
        hidden: torch.Tensor,
        scaling_factor: None,
        routing_map: torch.Tensor | None = None,
        probs: torch.Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        handle: Any = None,
    ) -> tuple[Any, ...]:
        if handle is not None:
            return hidden[handle[0]], None, None, None, handle
        assert num_of_experts_per_rank == 4
        expert, token = torch.nonzero(routing_map.T, as_tuple=True)
        counts = routing_map.sum(0).to(torch.int64)
        return hidden[token], probs[token, expert], None, counts, (token, expert, hidden.shape)

    def combine_with_unpermute(self, *, hidden: torch.Tensor, handle: Any, probs: torch.Tensor | None = None) -> tuple[Any, ...]:
        token, expert, shape = handle
        combined = torch.zeros(shape).index_add_(0, token, hidden.float()).to(hidden.dtype)
        return combined, None if probs is None else torch.zeros(shape[0], 4).index_put_((token, expert), probs)


def test_hybridep_row_against_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    _stand_in(monkeypatch, "deep_ep", HybridEPBuffer=_HybridEP)
    assert _judged("hybridep", small_problem(Ranks(0, 1, CPU))).fault is None
    _judged_gradients("hybridep", small_problem(Ranks(0, 1, CPU)))


def _dense(x: torch.Tensor, token: torch.Tensor, expert: torch.Tensor, p: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(x.shape, dtype=torch.float64)
    dtype, x, w13, w2 = x.dtype, x.double(), w13.double(), w2.double()  # once, so that gradients are rounded once
    for t, e, weight in zip(token.tolist(), expert.tolist(), p, strict=True):
        y[t] = y[t] + oracle.rows_of_expert(x[t : t + 1], weight[None], w13[e], w2[e])[0]
    return y.to(dtype)


def test_sonicmoe_row_against_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    inference: list[bool] = []

    def gemm(tuned: bool = True) -> bool:
        return tuned

    def routing_inputs(
        x: Any, p: Any, token: Any, expert: Any, w1: Any, b1: Any, w2: Any, b2: Any, experts: int, *rest: Any
    ) -> tuple[Any, None]:
        assert w1.shape == (384, 128, 4) and w2.shape == (128, 192, 4) and experts == 4 and b1 is None and b2 is None
        assert w1.stride() == (128, 1, 384 * 128) and w2.stride() == (192, 1, 128 * 192)
        assert p.shape == token.shape == expert.shape == (120,) and p.dtype == torch.float32
        stream, activation, without_backward, concatenated = rest
        assert token.dtype == expert.dtype == torch.int32 and (stream, activation, concatenated) == (99, "swiglu", True)
        assert without_backward == (not torch.is_grad_enabled())
        inference.append(without_backward)
        for module, name in (("forward", "gemm"), ("forward", "gemm_gated"), ("backward", "gemm"), ("backward", "gemm_dgated")):
            assert not getattr(sys.modules[f"sonicmoe.functional.{module}"], name)()
        return _dense(x, token, expert, p, w1.permute(2, 0, 1), w2.permute(2, 0, 1)), None

    _stand_in(monkeypatch, "sonicmoe.functional.forward", gemm=gemm, gemm_gated=gemm)
    _stand_in(monkeypatch, "sonicmoe.functional.backward", gemm=gemm, gemm_dgated=gemm)
    _stand_in(monkeypatch, "sonicmoe.functional", moe_general_routing_inputs=routing_inputs)
    _stand_in(monkeypatch, "sonicmoe.enums", ActivationType=types.SimpleNamespace(SWIGLU="swiglu"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=99))
    assert _judged("sonicmoe", small_problem(Ranks(0, 1, CPU))).fault is None
    assert inference == [True]
    _judged_gradients("sonicmoe", small_problem(Ranks(0, 1, CPU)))
    assert inference == [True, False, False]


def test_ligercute_row_against_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    popped: list[int] = []

    def forward(x: Any, ids: Any, p: Any, gate: Any, up: Any, down: Any, experts: int, topk: int, team: int) -> tuple[torch.Tensor, None]:
        assert ids.dtype == torch.int32 and p.dtype == torch.bfloat16 and (experts, topk, team) == (4, 3, 5)
        token = torch.arange(len(x)).repeat_interleave(topk)
        return _dense(x, token, ids.view(-1), p.view(-1).float(), torch.cat([gate, up], dim=1), down), None

    _stand_in(
        monkeypatch,
        "liger_cute_kernels.tvm_ffi",
        moe_configure_symmetric=lambda **sizes: None,
        moe_fused_fwd_bf16=forward,
        moe_pop_fwd=lambda: popped.append(1),
    )
    _stand_in(monkeypatch, "liger_cute_kernels.nvshmem", init_from_pg=lambda group: None, resolve_team=lambda group: 5)
    assert _judged("ligercute", small_problem(Ranks(0, 1, CPU))).fault is None
    assert popped == [1]
