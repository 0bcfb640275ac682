"""F-T4, the other half: every workload runs right at every EP size, with the counts that the generator promised."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mok_megatron.bench.routing import WORKLOADS, expert_counts, expert_ids, source_tokens
from tests.cpu.problems import SMALLEST_RING, Run, assert_matches_oracle, assert_same_bits, execute, random_batch
from tests.distributed import RankPool


@pytest.mark.parametrize("name", WORKLOADS)
def test_f_t4_workload_equals_oracle_at_every_ep_size(ranks4: RankPool, seed: int, name: str) -> None:
    shape = {"num_tokens": 331, "num_experts": 16, "topk": 4}
    for step in range(2):
        generated: dict[str, Any] = {"seed": seed, "step": step, **shape}
        batch = random_batch(seed + step, 331, experts=16, topk=4, dtype=torch.bfloat16, routes=expert_ids(name, **generated))
        alone = execute(None, batch, Run((331,)))
        assert alone.expert_rows == expert_counts(name, **generated)
        assert_matches_oracle(alone, batch.oracle())
        for ep in (2, 4):
            tokens = tuple(source_tokens(name, seed=seed, step=step, num_tokens=331, ep_size=ep))
            assert_same_bits(execute(ranks4, batch, Run(tokens, SMALLEST_RING, num_local_tokens=331)), alone)


@pytest.mark.parametrize("name", ["ragged_source", "zero_expert_and_rank"])
def test_f_t4_workload_at_ep_8(ranks8: RankPool, seed: int, name: str) -> None:
    routes = expert_ids(name, seed=seed, step=0, num_tokens=200, num_experts=16, topk=4)
    batch = random_batch(seed, 200, experts=16, topk=4, routes=routes)
    tokens = tuple(source_tokens(name, seed=seed, step=0, num_tokens=200, ep_size=8))
    got = execute(ranks8, batch, Run(tokens, SMALLEST_RING, num_local_tokens=200))
    assert_same_bits(got, execute(None, batch, Run((200,))))
