"""A-T1 to A-T6 at the level of the functional interface: cold, skewed, ragged, malformed and boundary routings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mok_megatron import MoKError, functional
from tests.cpu.problems import (
    SMALLEST_RING,
    Batch,
    Run,
    assert_matches_oracle,
    assert_same_bits,
    even_tokens,
    execute,
    local_part,
    random_batch,
    run_on_rank,
    workspace_for,
)
from tests.distributed import RankPool, job_group

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


# --- A-T1: cold rank, cold source -----------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("config", [{}, SMALLEST_RING], ids=["whole", "ring"])
@pytest.mark.parametrize("tokens", [(8, 8), (0, 8)], ids=["cold-rank", "cold-rank-and-source"])
def test_a_t1_all_routes_to_rank_0(ranks4: RankPool, seed: int, dtype: torch.dtype, tokens: tuple[int, int], config: dict[str, Any]) -> None:
    routes = torch.tensor([[0, 1]], dtype=torch.int32).repeat(sum(tokens), 1)
    batch = random_batch(seed, sum(tokens), dtype=dtype, routes=routes)
    run = Run(tokens, config, num_local_tokens=8, main_grads=torch.float32, main_grad_fill=3.25)
    got = execute(ranks4, batch, run)
    assert bool((got.dw13[2:] == 3.25).all()) and bool((got.dw2[2:] == 3.25).all())
    assert bool((got.dw13[:2] != 3.25).any())
    plain = execute(ranks4, batch, Run(tokens, config, num_local_tokens=8))
    assert_matches_oracle(plain, batch.oracle())


@DTYPES
def test_a_t1_source_without_tokens_receives(ranks4: RankPool, seed: int, dtype: torch.dtype) -> None:
    """Rank 0 has no token of its own while rank 1 sends to it; and a step in which nobody has any."""
    batch = random_batch(seed, 8, dtype=dtype)
    assert_matches_oracle(execute(ranks4, batch, Run((0, 8))), batch.oracle())
    empty = random_batch(seed, 0, dtype=dtype)
    got = execute(ranks4, empty, Run((0, 0), num_local_tokens=8))
    assert got.y.shape == (0, 64) and bool((got.dw13 == 0).all()) and bool((got.dw2 == 0).all())
    none = random_batch(seed, 8, dtype=dtype, missing=1.0)
    got = execute(ranks4, none, Run((3, 5), poison=True))
    assert bool((got.y == 0).all()) and bool((got.dx == 0).all()) and bool((got.d_router_weights == 0).all())


# --- A-T2: all to one expert ----------------------------------------------------------------------------------------------------


@DTYPES
def test_a_t2_all_to_one_expert_default_capacity(ranks4: RankPool, seed: int, dtype: torch.dtype) -> None:
    routes = torch.full((2048, 1), 5, dtype=torch.int32)
    batch = random_batch(seed, 2048, experts=16, topk=1, dtype=dtype, routes=routes)
    got = execute(ranks4, batch, Run((512,) * 4))
    assert got.expert_rows == [2048 if e == 5 else 0 for e in range(16)]
    assert_matches_oracle(got, batch.oracle())
    assert_same_bits(execute(ranks4, batch, Run((512,) * 4, {"minibatch_size": 256, "macrobatch_size": 512})), got)


def _overflow(rank: int, batch: Batch, run: Run, good: Batch) -> tuple[dict[str, Any], dict[str, Any]]:
    config, workspace = workspace_for(batch, run, job_group())
    part = local_part(batch, run.tokens, rank)
    try:
        functional.build_schedule(workspace, config, part.topk_experts)
    except MoKError as error:
        found = {"type": type(error).__name__, "text": str(error), **vars(error)}
    else:
        found = {"type": "none"}
    return found, run_on_rank(rank, good, run)


def test_a_t2_lowered_capacity_is_one_error_on_all_ranks(ranks4: RankPool, seed: int) -> None:
    """A quarter of 2048 routes and four experts' padding: 1024 rows, 2048 needed; counted after padding, nothing dropped."""
    routes = torch.full((2048, 1), 5, dtype=torch.int32)
    batch = random_batch(seed, 2048, experts=16, topk=1, routes=routes)
    good = random_batch(seed, 2048, experts=16, topk=1, routes=torch.arange(2048)[:, None] % 16)
    run = Run((512,) * 4, {"schedule_capacity_multiplier": 0.25})
    results = ranks4.run(_overflow, batch, run, good)
    for found, _ in results:
        assert found["type"] == "MoKCapacityError", found
        assert (found["rank"], found["needed_rows"], found["available_rows"]) == (1, 2048, 1024)
        assert "2048" in found["text"] and "1024" in found["text"] and "schedule_capacity_multiplier" in found["text"]
    assert torch.equal(torch.cat([r["y"] for _, r in results]), execute(None, good, Run((2048,))).y)


@pytest.mark.parametrize("rows", [384, 385])
def test_a_t2_capacity_counts_padded_rows(ranks4: RankPool, seed: int, rows: int) -> None:
    """Half of 2 x 256 routes is 256 rows, and 128 for the padding of a rank's only expert: 384 fit, 385 do not."""
    routes = torch.ones(512, 1, dtype=torch.int32)
    routes[rows:] = -1
    batch = random_batch(seed, 512, experts=2, topk=1, routes=routes)
    run = Run((256, 256), {"schedule_capacity_multiplier": 0.5})
    empty = random_batch(seed, 512, experts=2, topk=1, missing=1.0)
    kinds = [found["type"] for found, _ in ranks4.run(_overflow, batch, run, empty, ranks=2)]
    assert kinds == ["none" if rows == 384 else "MoKCapacityError"] * 2


# --- A-T3: ragged ranks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [(3, 0, 517, 64), (4095, 4095), (672,), (672, 1)])
def test_a_t3_ragged_ranks(ranks4: RankPool, seed: int, tokens: tuple[int, ...]) -> None:
    batch = random_batch(seed, sum(tokens), dtype=torch.bfloat16)
    got = execute(ranks4, batch, Run(tokens))
    assert_matches_oracle(got, batch.oracle())
    assert_same_bits(got, execute(None, batch, Run((sum(tokens),))))


def _growing(rank: int, steps: list[tuple[Batch, Run]]) -> tuple[list[torch.Tensor], list[int]]:
    ys, calls = [], []
    for batch, run in steps:
        ys.append(run_on_rank(rank, batch, run)["y"])
        calls.append(workspace_for(batch, run, job_group())[1].protocol.call)
    return ys, calls


def test_a_t3_one_rank_grows(ranks4: RankPool, seed: int) -> None:
    """64 tokens on both, then 640 on one rank only: the workspace holds what was agreed; every rank makes the same calls."""
    steps = []
    for tokens in [(64, 64), (64, 640), (0, 640), (64, 64)]:
        steps.append((random_batch(seed, sum(tokens)), Run(tokens, num_local_tokens=640)))
    results = ranks4.run(_growing, steps, ranks=2)
    assert results[0][1] == results[1][1]
    for i, (batch, _) in enumerate(steps):
        y = torch.cat([ys[i] for ys, _ in results])
        assert torch.equal(y, execute(None, batch, Run((batch.x.shape[0],))).y)


# --- A-T4: bad ids --------------------------------------------------------------------------------------------------------------


def test_a_t4_missing_routes_are_never_expert_0(ranks4: RankPool, seed: int) -> None:
    """-1 adds nothing and gets zero gradient, whatever its router weight is; it is not counted for expert 0."""
    routes = torch.tensor([[-1, -1], [2, -1], [-1, 3], [0, 1]], dtype=torch.int32).repeat(10, 1)
    batch = random_batch(seed, 40, routes=routes)
    want = execute(None, batch, Run((40,)))
    assert_matches_oracle(want, batch.oracle())
    batch.router_weights[routes < 0] = float("nan")
    got = execute(ranks4, batch, Run((13, 27), poison=True))
    assert_same_bits(got, want)
    assert got.expert_rows == [10, 10, 10, 10]
    assert bool((got.d_router_weights[routes < 0] == 0).all()) and bool((got.y[::4] == 0).all())


def _bad_ids(rank: int, batch: Batch, run: Run, bad: list[list[list[int]]]) -> tuple[list[tuple[str, str]], torch.Tensor]:
    """Rank 1 brings malformed ids, one table a call; then everybody runs a good step."""
    config, workspace = workspace_for(batch, run, job_group())
    part = local_part(batch, run.tokens, rank)
    found = []
    for table in bad:
        ids = torch.tensor(table) if rank == 1 else part.topk_experts
        try:
            functional.build_schedule(workspace, config, ids)
            found.append(("none", ""))
        except MoKError as error:
            found.append((type(error).__name__, str(error)))
    return found, run_on_rank(rank, batch, run)["y"]


def test_a_t4_bad_ids_are_an_error_on_every_rank(ranks4: RankPool, seed: int) -> None:
    batch = random_batch(seed, 12, experts=6)
    bad = [
        [[0, 1], [3, 3]],
        [[0, 6]],
        [[0, 1], [2, 3], [-2, 1]],
        [[2**32, 1]],
        [[2**31, 1]],
        [[-(2**63), 1]],
    ]
    places = [(1, 3), (0, 6), (2, -2), (0, 2**32), (0, 2**31), (0, -(2**63))]
    results = ranks4.run(_bad_ids, batch, Run((4, 4, 4)), bad, ranks=3)
    for rank, (found, _) in enumerate(results):
        for (kind, text), (token, expert) in zip(found, places, strict=True):
            assert kind == ("MoKArgumentError" if rank == 1 else "MoKPeerError"), (rank, kind, text)
            assert f"topk_experts[{token}, " in text and str(expert) in text and "rank 1" in text, text
    y = torch.cat([y for _, y in results])
    assert torch.equal(y, execute(None, batch, Run((12,))).y)


# --- A-T5: map, probabilities, padding ------------------------------------------------------------------------------------------


@DTYPES
def test_a_t5_zero_router_weight_has_a_gradient(ranks4: RankPool, seed: int, dtype: torch.dtype) -> None:
    """Route present with p = 0: contributes 0, and its gradient is dot(dy, expert(x)), which is not 0."""
    batch = random_batch(seed, 16, dtype=dtype, missing=0.0)
    batch.router_weights[:, 1] = 0.0
    got = execute(ranks4, batch, Run((6, 10)))
    assert_matches_oracle(got, batch.oracle())
    assert bool((got.d_router_weights[:, 1] != 0).all())
    only_first = random_batch(seed, 16, dtype=dtype, missing=0.0)
    only_first.topk_experts[:, 1] = -1
    assert torch.equal(execute(ranks4, only_first, Run((6, 10))).y, got.y)


def test_a_t5_padding_tokens_are_not_dispatched(ranks4: RankPool, seed: int) -> None:
    """4 ranks with 64 tokens of which 48 are valid, top-2: exactly 384 routes, pads get exactly 0."""
    batch = random_batch(seed, 256, experts=8, missing=0.0)
    pads = torch.arange(256) % 64 >= 48
    batch.topk_experts[pads] = -1
    batch.x[pads] = float("nan")
    batch.dy[pads] = float("nan")
    got = execute(ranks4, batch, Run((64,) * 4, SMALLEST_RING))
    assert sum(got.expert_rows) == 384
    assert bool((got.y[pads] == 0).all()) and bool((got.dx[pads] == 0).all())
    valid = Batch(
        batch.x[~pads],
        batch.router_weights[~pads],
        batch.topk_experts[~pads],
        batch.w13,
        batch.w2,
        batch.dy[~pads],
    )
    want = execute(None, valid, Run((192,)))
    assert torch.equal(got.y[~pads], want.y) and torch.equal(got.dx[~pads], want.dx)
    assert torch.equal(got.dw13, want.dw13) and torch.equal(got.dw2, want.dw2)


# --- A-T6: boundaries -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topk", [1, 2, 8])
@pytest.mark.parametrize("tokens", [255, 256, 257, 512, 513])
def test_a_t6_token_and_topk_boundaries(ranks4: RankPool, seed: int, tokens: int, topk: int) -> None:
    batch = random_batch(seed, tokens, experts=8, topk=topk, dtype=torch.bfloat16, missing=0.0)
    got = execute(ranks4, batch, Run(even_tokens(tokens, 2), SMALLEST_RING))
    assert_matches_oracle(got, batch.oracle())
    assert_same_bits(got, execute(None, batch, Run((tokens,))))


@pytest.mark.parametrize("experts", [127, 128, 129])
def test_a_t6_expert_boundaries(seed: int, experts: int) -> None:
    batch = random_batch(seed, 60, experts=experts, topk=8, dtype=torch.bfloat16)
    assert_matches_oracle(execute(None, batch, Run((60,), SMALLEST_RING)), batch.oracle())


def test_a_t6_most_routes_and_experts_that_are_allowed(seed: int) -> None:
    batch = random_batch(seed, 9, experts=256, topk=32, dtype=torch.bfloat16)
    assert_matches_oracle(execute(None, batch, Run((9,), SMALLEST_RING)), batch.oracle())
