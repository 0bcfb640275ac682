"""B-T1, B-T2, B-T3, B-T5 at the level of the functional interface: what arrives in main_grad, exactly.

The exact cases use numbers whose every intermediate is a power of two: x = 1, w13 = 1/2 at H = 64 give gate = up = 32, where sigmoid is 1 in
fp32; p = 1/1024 gives h = 1; w2 = 1/2 gives dh = 32 dy, so that d_gate = d_up = dy and every weight's gradient is dy itself.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mok_megatron import functional
from tests.cpu.problems import (
    OUTPUTS,
    SMALLEST_RING,
    Batch,
    Run,
    assert_matches_oracle,
    assert_same_bits,
    execute,
    local_part,
    random_batch,
    workspace_for,
)
from tests.distributed import RankPool, job_group

EXPERTS = 4


def _exact_batch(dy: float, dtype: torch.dtype) -> Batch:
    """One token for every expert; every element of dw13 and dw2 is ``dy``."""
    return Batch(
        x=torch.ones(EXPERTS, 64, dtype=dtype),
        router_weights=torch.full((EXPERTS, 1), 1 / 1024),
        topk_experts=torch.arange(EXPERTS, dtype=torch.int32)[:, None],
        w13=torch.full((EXPERTS, 128, 64), 0.5, dtype=dtype),
        w2=torch.full((EXPERTS, 64, 64), 0.5, dtype=dtype),
        dy=torch.full((EXPERTS, 64), dy, dtype=dtype),
    )


def _microbatches(rank: int, gradients: list[float], dtype: torch.dtype, grad_dtype: torch.dtype, overwrite_first: bool) -> list[torch.Tensor]:
    """Forward of all microbatches, then their backwards into one main_grad; returns the distinct values of both main_grads."""
    run = Run((EXPERTS // 2,) * 2, SMALLEST_RING)
    batches = [local_part(_exact_batch(g, dtype), run.tokens, rank) for g in gradients]
    config, workspace = workspace_for(_exact_batch(1.0, dtype), run, job_group())
    fill = float("nan") if overwrite_first else 0.0
    grads = tuple(torch.full(w.shape, fill, dtype=grad_dtype) for w in (batches[0].w13, batches[0].w2))
    kept = []
    for part in batches:
        schedule = functional.build_schedule(workspace, config, part.topk_experts)
        _, context = functional.forward(config, workspace, schedule, part.x, part.router_weights, part.w13, part.w2)
        kept.append((schedule, context))
    for index, (part, (schedule, context)) in enumerate(zip(batches, kept, strict=True)):
        operands = (config, workspace, schedule, context, part.dy, part.x, part.router_weights, part.w13, part.w2)
        first = index == 0 and overwrite_first
        functional.backward(*operands, main_grads=grads, overwrite_main_grads=(first, first))
    return [torch.unique(g.float()) for g in grads]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("overwrite_first", [False, True], ids=["accumulate", "overwrite-first"])
def test_b_t1_binary_coded_microbatches(ranks4: RankPool, dtype: torch.dtype, overwrite_first: bool) -> None:
    """2^i from microbatch i: 15 = all once; 1 = first only, 8 = last only, 30 = twice, 7 or 14 = one lost."""
    arguments = ([1.0, 2.0, 4.0, 8.0], dtype, torch.float32, overwrite_first)
    for values in ranks4.run(_microbatches, *arguments, ranks=2):
        assert [v.tolist() for v in values] == [[15.0], [15.0]]


@pytest.mark.parametrize(("grad_dtype", "want"), [(torch.float32, 257.0), (torch.bfloat16, 256.0)])
def test_b_t2_fp32_accumulation(ranks4: RankPool, grad_dtype: torch.dtype, want: float) -> None:
    for values in ranks4.run(_microbatches, [256.0, 1.0], torch.bfloat16, grad_dtype, False, ranks=2):
        assert [v.tolist() for v in values] == [[want], [want]]


def test_b_t2_bf16_main_grad_is_rounded_once(seed: int) -> None:
    """bf16(fp32 main_grad + fp32 gradient), not bf16 + bf16(gradient)."""
    batch = random_batch(seed, 100, dtype=torch.bfloat16)
    exact = execute(None, batch, Run((100,), main_grads=torch.float32))
    rounded = execute(None, batch, Run((100,), main_grads=torch.bfloat16, main_grad_fill=1.0))
    for name in ("dw13", "dw2"):
        want = (1.0 + getattr(exact, name)).bfloat16()
        assert torch.equal(getattr(rounded, name), want)
        assert not torch.equal(want, 1.0 + getattr(exact, name).bfloat16())


@pytest.mark.parametrize("weights_as_list", [False, True], ids=["tensor", "list"])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("config", [{}, SMALLEST_RING], ids=["whole", "ring"])
def test_b_t3_cold_expert_in_both_write_modes(
    ranks4: RankPool, seed: int, weights_as_list: bool, grad_dtype: torch.dtype, config: dict[str, Any]
) -> None:
    """Experts 1 and 2 and the whole of rank 1 (4 to 7) get no token: 7 stays 7, overwritten becomes 0 even from NaN."""
    routes = torch.tensor([0, 3], dtype=torch.int32).repeat(150, 1)
    batch = random_batch(seed, 150, experts=8, dtype=torch.bfloat16, routes=routes)
    cold = [1, 2, 4, 5, 6, 7]

    def run(fill: float, overwrite: bool) -> Run:
        return Run(
            (100, 50),
            config,
            weights_as_list=weights_as_list,
            main_grads=grad_dtype,
            main_grad_fill=fill,
            overwrite=overwrite,
        )

    added = execute(ranks4, batch, run(7.0, False))
    for name in ("dw13", "dw2"):
        assert bool((getattr(added, name)[cold] == 7.0).all())
    zeroed = execute(ranks4, batch, run(float("nan"), True))
    for name in ("dw13", "dw2"):
        assert bool((getattr(zeroed, name)[cold] == 0.0).all())
    assert_matches_oracle(zeroed, batch.oracle(grad_dtype))
    returned = execute(ranks4, batch, Run((100, 50), config, weights_as_list=weights_as_list))
    assert_same_bits(zeroed, returned, ("y", "dx", "d_router_weights"))
    if grad_dtype == torch.bfloat16:
        assert_same_bits(zeroed, returned)


def test_accumulation_adds_the_gradient_once_in_fp32(ranks4: RankPool, seed: int) -> None:
    batch = random_batch(seed, 300, experts=8, dtype=torch.bfloat16)
    fresh = execute(ranks4, batch, Run((100, 200), SMALLEST_RING, main_grads=torch.float32))
    onto = execute(ranks4, batch, Run((100, 200), SMALLEST_RING, main_grads=torch.float32, main_grad_fill=0.7))
    assert_matches_oracle(fresh, batch.oracle(torch.float32))
    for name in ("dw13", "dw2"):
        assert torch.equal(getattr(onto, name), torch.tensor(0.7) + getattr(fresh, name))


@pytest.mark.parametrize("overwrite", [(True, False), (False, True)], ids=["w13", "w2"])
def test_overwriting_one_weight_accumulates_the_other(seed: int, overwrite: tuple[bool, bool]) -> None:
    batch = random_batch(seed, 100, routes=torch.tensor([0, 2]).repeat(100, 1))
    fresh = execute(None, batch, Run((100,), main_grads=torch.float32))
    got = execute(None, batch, Run((100,), main_grads=torch.float32, main_grad_fill=5.0, overwrite=overwrite))
    for name, flag in zip(("dw13", "dw2"), overwrite, strict=True):
        assert torch.equal(getattr(got, name), getattr(fresh, name) + (0.0 if flag else 5.0)), name


def _selected(rank: int, batch: Batch) -> dict[str, Any]:
    """Per-expert targets inside flat buffers: expert 1 frozen for w13, all of w2 frozen; mixed overwrite; guards around."""
    run = Run((batch.x.shape[0],), SMALLEST_RING)
    config, workspace = workspace_for(batch, run, None)
    schedule = functional.build_schedule(workspace, config, batch.topk_experts)
    operands = (batch.x, batch.router_weights, batch.w13, batch.w2)
    _, context = functional.forward(config, workspace, schedule, *operands)
    size, guard = batch.w13[0].numel(), 13
    flat = torch.full((batch.experts * (size + guard) + guard,), 3.0)
    views = [flat[guard + e * (size + guard) :][:size].view(batch.w13[0].shape) for e in range(batch.experts)]
    targets = [view if e != 1 else None for e, view in enumerate(views)]
    dx, d_p, dw13, dw2 = functional.backward(
        config,
        workspace,
        schedule,
        context,
        batch.dy,
        *operands,
        main_grads=(targets, None),
        overwrite_main_grads=([e == 2 for e in range(batch.experts)], False),
    )
    guards = torch.cat([flat[e * (size + guard) :][:guard] for e in range(batch.experts + 1)])
    return {"dx": dx, "d_p": d_p, "none": (dw13, dw2), "views": torch.stack(views), "guards": guards}


def test_frozen_experts_and_flat_buffers(seed: int) -> None:
    batch = random_batch(seed, 200)
    got = _selected(0, batch)
    want = execute(None, batch, Run((200,), main_grads=torch.float32))
    assert got["none"] == (None, None)
    assert torch.equal(got["dx"], want.dx) and torch.equal(got["d_p"], want.d_router_weights)
    assert bool((got["guards"] == 3.0).all())
    for expert, view in enumerate(got["views"]):
        expected = want.dw13[expert] + {1: float("nan"), 2: 0.0}.get(expert, 3.0)
        assert torch.equal(view, torch.full_like(view, 3.0) if expert == 1 else expected), expert


def test_b_t5_same_expert_gradients_at_every_ep_size(ranks4: RankPool, seed: int) -> None:
    """The same 8 tokens at EP 1, 2 and 4: not doubled, not halved, not a bit different."""
    batch = random_batch(seed, 8)
    want = execute(None, batch, Run((8,), main_grads=torch.float32))
    for tokens in [(4, 4), (8, 0), (2, 2, 2, 2)]:
        assert_same_bits(execute(ranks4, batch, Run(tokens, main_grads=torch.float32)), want)
    assert_matches_oracle(want, batch.oracle())


def test_b_t5_router_gradient_equals_central_differences(ranks4: RankPool, seed: int) -> None:
    """y is linear in the router weights, so that a large step is exact up to rounding."""
    batch = random_batch(seed, 8, missing=0.0)
    run = Run((4, 4))
    analytic = execute(ranks4, batch, run).d_router_weights
    assert bool((analytic != 0).all())
    middle = batch.router_weights.clone()
    for slot in range(2):
        losses = []
        for sign in (0.5, -0.5):
            batch.router_weights = middle.clone()
            batch.router_weights[:, slot] += sign
            losses.append((execute(ranks4, batch, run).y.double() * batch.dy.double()).sum(1))
        torch.testing.assert_close(losses[0] - losses[1], analytic[:, slot].double(), rtol=1e-4, atol=1e-4)
    assert set(OUTPUTS) >= {"y", "d_router_weights"}
