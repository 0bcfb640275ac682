"""Rows of the benchmark: right ones on every workload, planted wrong ones are found, libraries that are absent here against stand-ins."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from mok_megatron.bench import oracle
from mok_megatron.bench.problem import LayerProblem, Ranks
from mok_megatron.bench.rows import COMPETITORS
from mok_megatron.bench.rows.experts import sum_rows, swiglu
from mok_megatron.bench.workloads import WORKLOADS
from tests.cpu import bench_helpers
from tests.cpu.bench_helpers import CPU, small_problem
from tests.distributed import RankPool
from tests.oracle import moe_oracle

_RUN_HERE = {"mok", "mok_context", "nccl", "bare", "mok_schedule"}


@pytest.mark.parametrize("workload", WORKLOADS)
def test_rows_are_right_on_every_workload(ranks2: RankPool, workload: str) -> None:
    for ep_size, statuses in ((1, [bench_helpers.all_rows(0, 1, workload, 24)]), (2, ranks2.run(bench_helpers.all_rows, 2, workload, 24))):
        for status in statuses:
            good = _RUN_HERE | ({"mok_ep1"} if ep_size > 1 else set())
            assert {name for name, text in status.items() if text == "ok"} == good, status
            for name, module in (
                ("hybridep", "deep_ep"),
                ("deepep", "deep_ep"),
                ("sonicmoe", "sonicmoe"),
                ("ligercute", "liger_cute_kernels"),
            ):
                assert status[name] == f"skipped: not installed ({module})"


@pytest.mark.parametrize("ep_size", [1, 2])
def test_planted_faults_are_reported_and_not_timed(ranks2: RankPool, ep_size: int) -> None:
    everyone = [bench_helpers.planted(0, 1)] if ep_size == 1 else ranks2.run(bench_helpers.planted, 2)
    for results in everyone:
        last = ep_size - 1
        status, reason, readings = results["lost_route"]
        assert (status, readings) == ("wrong", 0)
        assert f"rank {last}: 1 of 40 sampled rows outside, row 0 worst" in reason
        status, reason, readings = results["spoilt_later"]
        assert (status, readings) == ("wrong", 0)
        assert "1 of 5120 elements are not finite after the timing" in reason
        status, reason, readings = results["raising"]
        assert (status, readings) == ("failed", 0)
        assert "RuntimeError: no such kernel" in reason and (ep_size == 1 or "rank 1" in reason)
        status, reason, readings = results["half"]
        assert (status, readings) == ("wrong", 0)
        assert "[20, 128]" in reason and "[40, 128]" in reason
        for name in ("mok", "nccl", "bare", "mok_schedule"):
            assert results[name] == ("ok", None, 2)


def test_bare_row_is_judged_too() -> None:
    problem = small_problem(Ranks(0, 1, CPU))
    row = COMPETITORS["bare"](problem)
    reference = oracle.make_reference(problem)
    assert row.verify(reference).fault is None
    row._ends = row._ends.roll(1)
    assert row.verify(reference).fault is not None


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


def _stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(members)
    monkeypatch.setitem(sys.modules, name, module)


def _judged(name: str, problem: LayerProblem) -> oracle.Verdict:
    return COMPETITORS[name](problem).verify(oracle.make_reference(problem))


class _DeepEP:
    """What ``deep_ep.Buffer`` does among one rank, with routes of the second half of the experts going elsewhere and giving nothing back."""

    def __init__(self, group: Any, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        assert num_nvl_bytes == 256 and num_rdma_bytes == 0

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Any:
        return types.SimpleNamespace(get_nvl_buffer_size_hint=lambda row_bytes, num_ranks: row_bytes)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, ids: torch.Tensor, num_experts: int) -> tuple[Any, ...]:
        return None, None, torch.bincount(ids.view(-1), minlength=num_experts), torch.ones(len(ids), 1, dtype=torch.bool), None

    def dispatch(self, x: torch.Tensor, **arguments: Any) -> tuple[Any, ...]:
        ids = arguments["topk_idx"]
        assert ids.dtype == torch.int64
        counts = arguments["num_tokens_per_expert"].tolist()
        keep = ids < 2
        return x, torch.where(keep, ids, -1), arguments["topk_weights"].where(keep, 0.0), [*counts[:2], 0, 0], "handle", None

    def combine(self, x: torch.Tensor, handle: str) -> tuple[Any, ...]:
        assert handle == "handle"
        return x, None, None


def test_deepep_row_against_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    _stand_in(monkeypatch, "deep_ep", Buffer=_DeepEP)
    problem = small_problem(Ranks(0, 1, CPU))
    y = COMPETITORS["deepep"](problem).forward()
    problem.router_weights[problem.topk_experts >= 2] = 0.0  # what the stand-in keeps to itself
    assert oracle.judge(problem, oracle.make_reference(problem), y).fault is None


class _HybridEP:
    def __init__(self, **arguments: Any) -> None:
        assert arguments["max_num_of_tokens_per_rank"] >= 512 and arguments["num_local_experts"] == 4

    def dispatch_with_permute(self, *, hidden: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor, **rest: Any) -> tuple[Any, ...]:
        expert, token = torch.nonzero(routing_map.T, as_tuple=True)
        counts = routing_map.sum(0).to(torch.int64)
        return hidden[token], probs[token, expert], None, counts, (token, hidden.shape)

    def combine_with_unpermute(self, *, hidden: torch.Tensor, handle: Any) -> tuple[Any, ...]:
        token, shape = handle
        return torch.zeros(shape).index_add_(0, token, hidden.float()).to(hidden.dtype), None


def test_hybridep_row_against_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    _stand_in(monkeypatch, "deep_ep", HybridEPBuffer=_HybridEP)
    assert _judged("hybridep", small_problem(Ranks(0, 1, CPU))).fault is None


def _dense(x: torch.Tensor, token: torch.Tensor, expert: torch.Tensor, p: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(x.shape, dtype=torch.float64)
    for t, e, weight in zip(token.tolist(), expert.tolist(), p, strict=True):
        y[t] += oracle.rows_of_expert(x[t : t + 1], weight[None], w13[e], w2[e])[0]
    return y.to(x.dtype)


def test_sonicmoe_row_against_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def gemm(tuned: bool = True) -> bool:
        return tuned

    def routing_inputs(
        x: Any, p: Any, token: Any, expert: Any, w1: Any, b1: Any, w2: Any, b2: Any, experts: int, *rest: Any
    ) -> tuple[Any, None]:
        assert w1.shape == (384, 128, 4) and w2.shape == (128, 192, 4) and experts == 4 and b1 is None and b2 is None
        assert token.dtype == expert.dtype == torch.int32 and rest == (99, "swiglu", True, True)
        assert not sys.modules["sonicmoe.functional.forward"].gemm()
        return _dense(x, token, expert, p, w1.permute(2, 0, 1), w2.permute(2, 0, 1)), None

    _stand_in(monkeypatch, "sonicmoe.functional.forward", gemm=gemm, gemm_gated=gemm)
    _stand_in(monkeypatch, "sonicmoe.functional", moe_general_routing_inputs=routing_inputs)
    _stand_in(monkeypatch, "sonicmoe.enums", ActivationType=types.SimpleNamespace(SWIGLU="swiglu"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=99))
    assert _judged("sonicmoe", small_problem(Ranks(0, 1, CPU))).fault is None


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
