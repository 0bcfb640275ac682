"""The device's schedule equals the host's bit for bit."""

import pytest
import torch

from mok_megatron import ops
from mok_megatron.bench.routing import WORKLOADS, expert_ids, source_tokens
from tests.gpu.harness import Group, random_problem


def _assert_equal_to_host(group: Group, routes: list[torch.Tensor], num_local_tokens: int, topk: int) -> None:
    gathered = torch.full((len(routes), num_local_tokens, topk), 7, dtype=torch.int32)
    for rank, ids in enumerate(routes):
        gathered[rank, : len(ids)] = ids
    tokens = torch.tensor([len(ids) for ids in routes])
    for rank, made in enumerate(group.schedules(routes)):
        host = ops.route_schedule(gathered, tokens, rank, group.local, group.capacity)
        for name, expected in zip(("row_source_rank", "row_source_slot", "expert_rows", "expert_row_offsets", "num_rows"), host, strict=True):
            assert torch.equal(getattr(made, name).cpu(), expected), (rank, name)
        assert torch.equal(made.topk_experts.cpu(), routes[rank].int())
    assert not any(fault[0] for fault in group.faults())


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    ("ep_size", "tokens", "experts", "topk"),
    [(1, [300], 8, 2), (2, [777, 0], 64, 8), (4, [100, 5, 513, 64], 32, 4), (1, [1], 256, 32), (8, [65] * 8, 64, 6)],
)
def test_equals_host(ep_size: int, tokens: list[int], experts: int, topk: int, wide: bool) -> None:
    group = Group(ep_size, max(tokens), topk, 64, 64, experts)
    for seed in range(4):  # consecutive calls: both halves of the double buffer
        routes = random_problem(tokens, 64, 64, experts, topk, seed=100 + seed, missing=0.1).topk_experts
        _assert_equal_to_host(group, [r.long() if wide else r for r in routes], max(tokens), topk)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_workloads(workload: str) -> None:
    total, experts, topk, ep_size = 2048, 32, 4, 2
    group = Group(ep_size, total, topk, 64, 64, experts)
    for step in range(2):
        ids = expert_ids(workload, seed=11, step=step, num_tokens=total, num_experts=experts, topk=topk)
        tokens = source_tokens(workload, seed=11, step=step, num_tokens=total, ep_size=ep_size)
        _assert_equal_to_host(group, list(ids.split(tokens)), total, topk)


def test_bad_ids_are_reported() -> None:
    group = Group(1, 64, 2, 64, 64, 8)
    routes = random_problem([64], 64, 64, 8, 2, seed=1).topk_experts[0]
    routes[17, 1] = 8
    group.schedules([routes])
    code, *_ = group.faults()[0]
    assert code == 3
    assert group.faults()[0][8:12] == [1, 17, 1, 8]


def test_overflow_is_reported() -> None:
    group = Group(2, 512, 2, 64, 64, 8, capacity=0.25)
    routes = [torch.tensor([[0, 1]] * 512, dtype=torch.int32)] * 2
    group.schedules(routes)
    fault = group.faults()[0]
    assert fault[0] == 4
    assert fault[8:10] == [2048, group.capacity]
