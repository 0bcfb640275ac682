"""Many steps on real processes with random delays: one rank ahead or late, pairs that exchange nothing, layers sharing buffers."""

from __future__ import annotations

import random
import time

import torch

from mok_megatron import functional
from tests.cpu.problems import SMALLEST_RING, Batch, Run, execute, local_part, random_batch, workspace_for
from tests.distributed import RankPool, job_group

TOKENS = [(40, 0, 10, 50), (0, 0, 100, 0), (25, 25, 25, 25), (1, 97, 1, 1)]
STEPS = 40


def _batch(seed: int, step: int) -> Batch:
    """Every third step each token stays with experts of one rank, so that most pairs of ranks exchange nothing."""
    batch = random_batch(seed + step, 100, experts=8)
    if step % 3 == 0:
        owner = torch.arange(100, dtype=torch.int32)[:, None] % 4
        batch.topk_experts = torch.cat([owner * 2, owner * 2 + 1], 1)
    return batch


def _soak(rank: int, seed: int) -> list[list[torch.Tensor]]:
    delays = random.Random(f"{seed}/{rank}")

    def pause() -> None:
        if delays.random() < 0.2:
            time.sleep(delays.random() * 0.02)

    results, waiting = [], []
    for step in range(STEPS):
        run = Run(TOKENS[step % len(TOKENS)], SMALLEST_RING, num_local_tokens=100)
        config, workspace = workspace_for(_batch(seed, step), run, job_group())
        part = local_part(_batch(seed, step), run.tokens, rank)
        pause()
        schedule = functional.build_schedule(workspace, config, part.topk_experts)
        pause()
        operands = (config, workspace, schedule)
        y, context = functional.forward(*operands, part.x, part.router_weights, part.w13, part.w2)
        waiting.append((operands, context, part, y))
        if step % 2:  # two forwards, then their backwards, last one first
            for operands, context, part, y in reversed(waiting):
                pause()
                grads = functional.backward(*operands, context, part.dy, part.x, part.router_weights, part.w13, part.w2)
                results.append([y, *grads])
            waiting = []
    return results


def test_many_steps_with_random_delays_keep_their_bits(ranks4: RankPool, seed: int) -> None:
    parts = ranks4.run(_soak, seed, timeout=120)
    order = [step + 1 if step % 2 == 0 else step - 1 for step in range(STEPS)]
    for position, step in enumerate(order):
        want = execute(None, _batch(seed, step), Run((100,)))
        for i, name in enumerate(("y", "dx", "d_router_weights", "dw13", "dw2")):
            got = torch.cat([p[position][i] for p in parts])
            assert torch.equal(got, getattr(want, name)), (step, name)


def _overtaking(rank: int, batches: list[Batch], tokens: tuple[int, int]) -> list[bool]:
    """Two recomputations in a row; rank 1 comes late to both, rank 0 needs nothing from it and could run away."""
    run = Run(tokens, num_local_tokens=100)
    config, workspace = workspace_for(batches[0], run, job_group())
    parts = [local_part(batch, tokens, rank) for batch in batches]
    schedule = functional.build_schedule(workspace, config, parts[0].topk_experts)
    contexts = []
    for part in parts:
        if rank == 1:
            time.sleep(0.3)
        operands = (part.x, part.router_weights, part.w13)
        contexts.append(functional.recompute_forward_context(config, workspace, schedule, *operands))
    source, slot = schedule.row_source_rank, schedule.row_source_slot
    real = source >= 0
    token = torch.where(source == 0, 0, tokens[0])[real] + slot[real] // 2
    rows = torch.nonzero(real)[:, 0]
    return [torch.equal(c.x_rows[rows], batch.x[token]) for c, batch in zip(contexts, batches, strict=True)]


def test_a_fast_rank_does_not_overwrite_what_a_slow_one_still_reads(ranks4: RankPool, seed: int) -> None:
    """A pass that pushes nothing must wait as well: rank 0's next x may not replace the one that rank 1 has yet to pull."""
    routes = torch.tensor([[0, 4]], dtype=torch.int32).repeat(60, 1)
    routes[40:, 0] = -1
    batches = [random_batch(seed + i, 60, experts=8, routes=routes) for i in range(3)]
    results = ranks4.run(_overtaking, batches, (40, 20), ranks=2)
    assert results == [[True] * 3] * 2
