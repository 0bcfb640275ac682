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


@pytest.mark.parametrize(
    ("token", "slot", "expert", "kind"),
    [
        (17, 1, 8, 1),
        (0, 0, -2, 1),
        (63, 1, 2**31 - 1, 1),
        (5, 0, -(2**31), 1),
        (9, 1, None, 2),
        (1, 0, 2**32, 1),
        (2, 1, 2**31, 1),
        (3, 1, -(2**63), 1),
    ],
)
def test_a_t4_bad_ids_are_reported(token: int, slot: int, expert: int | None, kind: int) -> None:
    """Out of range, also where 32 bits of it are an id, or twice in a row; the routes around it are what they were."""
    narrow = expert is None or -(2**31) <= expert < 2**31
    for dtype in (torch.int32, torch.int64) if narrow else (torch.int64,):
        group = Group(2, 64, 2, 64, 64, 8)
        routes = [r.to(dtype) for r in random_problem([64, 64], 64, 64, 8, 2, seed=1).topk_experts]
        routes[1][token, slot] = routes[1][token, 0] if expert is None else expert
        bad = int(routes[1][token, slot])
        made = group.schedules(routes)
        faults = group.faults()
        assert faults[0][0] == 0
        assert faults[1][0] == 3
        assert faults[1][8:12] == [kind, token, slot, bad]
        routes[1][token, slot] = -1
        assert torch.equal(made[1].topk_experts.cpu(), routes[1].int())
        assert sum(int(schedule.expert_rows.sum()) for schedule in made) == 2 * 64 * 2 - 1


def test_overflow_is_reported() -> None:
    """No row is written where there is no place for it: the schedule is empty."""
    group = Group(2, 512, 2, 64, 64, 8, capacity=0.25)
    routes = [torch.tensor([[0, 1]] * 512, dtype=torch.int32)] * 2
    made = group.schedules(routes)[0]
    fault = group.faults()[0]
    assert fault[0] == 4
    assert fault[8:10] == [2048, group.capacity]
    assert not made.expert_row_offsets.any()
    assert (made.row_source_rank == -1).all()
