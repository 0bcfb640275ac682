"""How large a workspace is: the ring's default, the two-wave rule, and a capacity that the default multiplier cannot overflow."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from mok_megatron.workspace import WorkspaceShape


def shape(**changes: object) -> WorkspaceShape:
    values: dict[str, object] = {
        "ep_size": 4,
        "num_local_tokens": 1000,
        "hidden_size": 256,
        "topk": 4,
        "num_local_experts": 8,
        "intermediate_size": 64,
        "dtype": torch.bfloat16,
    }
    return WorkspaceShape(**{**values, **changes})  # type: ignore[arg-type]


@given(
    counts=st.lists(st.integers(0, 700), min_size=1, max_size=16),
    ep_size=st.integers(1, 8),
    topk=st.integers(1, 4),
)
def test_the_default_capacity_cannot_overflow(counts: list[int], ep_size: int, topk: int) -> None:
    """Any counts of a rank's experts that the group's routes can give, padded to 128 each, fit."""
    topk = min(topk, len(counts) * ep_size)
    tokens = -(-sum(counts) // (ep_size * topk))  # the fewest tokens a rank that bring so many routes
    found = shape(ep_size=ep_size, num_local_tokens=tokens, topk=topk, num_local_experts=len(counts))
    assert sum(-(-count // 128) * 128 for count in counts) <= found.capacity_rows
    assert found.capacity_rows % 128 == 0


def test_a_lowered_capacity_scales_with_all_routes_and_leaves_room_for_padding() -> None:
    routes = 4 * 1000 * 4
    assert shape().capacity_rows == routes + 8 * 128
    assert shape(schedule_capacity_multiplier=0.25).capacity_rows == (routes // 4 + 127) // 128 * 128 + 8 * 128


def test_the_ring_follows_the_tokens_and_is_no_constant() -> None:
    sizes = [shape(num_local_tokens=tokens).ring(num_sms=1)[1] for tokens in (128, 1024, 8192)]
    for tokens, rows in zip((128, 1024, 8192), sizes, strict=True):
        assert tokens * 4 <= rows <= 2 * tokens * 4 + 8 * 128 + 512, (tokens, rows)
    assert sizes[0] < sizes[1] < sizes[2]


@given(
    tokens=st.integers(0, 5000),
    sms=st.integers(1, 132),
    minibatch=st.sampled_from([None, 128, 384]),
    macrobatch=st.sampled_from([None, 384, 1152]),
)
def test_the_ring_holds_whole_minibatches(tokens: int, sms: int, minibatch: int | None, macrobatch: int | None) -> None:
    found = shape(num_local_tokens=tokens, minibatch_size=minibatch, macrobatch_size=macrobatch)
    small, large = found.ring(sms)
    assert small % 128 == 0 and small > 0 and large % small == 0 and large >= small
    assert small == (minibatch or small) and large == (macrobatch or large)


def test_the_two_wave_rule() -> None:
    """A third of 2 * SMs * 128 * 256 / min(2I, H) rows, to the next multiple of 2048, when the ring has room for it."""
    big = shape(num_local_tokens=100_000)
    assert 2 * 132 * 128 * 256 / 128 / 3 == 22_528
    assert big.ring(132)[0] == 11 * 2048 == 22_528
    assert big.ring(133)[0] == 12 * 2048
    wide = shape(num_local_tokens=100_000, hidden_size=7168, intermediate_size=2048)
    assert wide.ring(132)[0] == 2048  # 704 = 2 * 132 * 128 * 256 / 4096 / 3, up to 2048
