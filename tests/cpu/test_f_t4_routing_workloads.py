"""F-T4, the generator's half: counts are exact, tables are legal, and nothing depends on EP or on global random state."""

from __future__ import annotations

import random

import pytest
import torch

from mok_megatron.bench.routing import GROUPS, WORKLOADS, expert_counts, expert_ids, source_tokens
from mok_megatron.errors import MoKArgumentError

SHAPES = [(0, 8, 2), (1, 4, 2), (64, 4, 2), (257, 16, 4), (1000, 64, 8), (96, 6, 6)]


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize(("tokens", "experts", "topk"), SHAPES)
def test_f_t4_table_has_the_counts_and_no_repeats(seed: int, name: str, tokens: int, experts: int, topk: int) -> None:
    for step in range(3):
        shape = {"seed": seed, "step": step, "num_tokens": tokens, "num_experts": experts, "topk": topk}
        counts, table = expert_counts(name, **shape), expert_ids(name, **shape)
        assert table.shape == (tokens, topk) and table.dtype == torch.int32
        assert torch.bincount(table.flatten().long(), minlength=experts).tolist() == counts
        assert sum(counts) == tokens * topk and max(counts) <= tokens and min(counts) >= 0
        assert bool((table[:, 1:] > table[:, :-1]).all())


@pytest.mark.parametrize("name", WORKLOADS)
def test_f_t4_depends_on_name_seed_and_step_only(name: str) -> None:
    shape = {"num_tokens": 200, "num_experts": 16, "topk": 4}
    first = expert_ids(name, seed=3, step=1, **shape)
    random.seed(0)
    torch.manual_seed(0)
    assert torch.equal(expert_ids(name, seed=3, step=1, **shape), first)
    assert not torch.equal(expert_ids(name, seed=4, step=1, **shape), first)
    assert not torch.equal(expert_ids(name, seed=3, step=2, **shape), first)


@pytest.mark.parametrize("name", WORKLOADS)
def test_f_t4_sources_join_over_ep_sizes(seed: int, name: str) -> None:
    cuts = {ep: source_tokens(name, seed=seed, step=0, num_tokens=1003, ep_size=ep) for ep in (1, 2, 4, 8)}
    for ep, tokens in cuts.items():
        assert len(tokens) == ep and sum(tokens) == 1003
        joined = [sum(cuts[8][r * 8 // ep : (r + 1) * 8 // ep]) for r in range(ep)]
        assert joined == tokens
    assert (min(cuts[8]) == 0) == (name == "ragged_source")


def _counts(name: str, step: int = 0, seed: int = 11, tokens: int = 512, experts: int = 64, topk: int = 4) -> list[int]:
    return expert_counts(name, seed=seed, step=step, num_tokens=tokens, num_experts=experts, topk=topk)


def _group_counts(counts: list[int]) -> list[int]:
    width = len(counts) // GROUPS
    return [sum(counts[g * width : (g + 1) * width]) for g in range(GROUPS)]


def test_f_t4_each_workload_is_what_its_name_says() -> None:
    routes = 512 * 4
    assert set(_counts("balanced")) == {routes // 64}
    assert sorted(_counts("balanced", tokens=10, experts=16, topk=2)) == [1] * 12 + [2] * 4
    hot = sorted(_counts("hot_experts"), reverse=True)
    assert sum(hot[:8]) == pytest.approx(0.8 * routes, abs=8) and hot[8] < hot[7] / 4
    assert max(_group_counts(_counts("hot_rank"))) == pytest.approx(0.75 * routes, abs=8)
    spread = _counts("spread_hot")
    assert max(_group_counts(spread)) - min(_group_counts(spread)) <= 8 and max(spread) > 4 * sorted(spread)[32]
    cold = _counts("zero_expert_and_rank")
    assert cold[32:] == [0] * 32 and cold[:32].count(0) == 1
    moving = [_group_counts(_counts("rotating_hotspot", step)) for step in range(GROUPS)]
    hottest = [groups.index(max(groups)) for groups in moving]
    assert sorted(hottest) == list(range(GROUPS)) and (hottest[1] - hottest[0]) % GROUPS == 1
    peaks = [max(_counts("burst", step)) for step in range(8)]
    assert sorted(peaks) == [32] * 6 + [512] * 2 and peaks[:4] != peaks[1:5]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"name": "skewed"}, "name='skewed'.*balanced"),
        ({"topk": 5}, "topk=5.*num_experts=4"),
        ({"topk": 0}, "topk=0"),
        ({"num_tokens": -1}, "num_tokens=-1"),
    ],
)
def test_f_t4_bad_arguments_are_named(arguments: dict[str, object], text: str) -> None:
    good = {"name": "balanced", "seed": 0, "step": 0, "num_tokens": 8, "num_experts": 4, "topk": 2}
    with pytest.raises(MoKArgumentError, match=text):
        expert_ids(**{**good, **arguments})  # type: ignore[arg-type]
    with pytest.raises(MoKArgumentError, match="ep_size=3"):
        source_tokens("balanced", seed=0, step=0, num_tokens=8, ep_size=3)
