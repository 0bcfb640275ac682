"""Routing workloads: which experts every token of a global batch goes to, balanced or not.

A workload is a function of (name, seed, step) and of the shape of the global batch alone. The number of expert-parallel ranks does
not enter: routes are made for one global list of tokens, and :func:`source_tokens` cuts that list into ranks by joining
``GROUPS`` fixed source segments, so that EP 1, 2, 4 and 8 see the same tokens and the same routes. In the same way "a rank" of a
workload (the hot one, the cold one) is a group of E / ``GROUPS`` neighbouring experts: the share of one rank at EP 8, and inside the
share of one rank at any smaller EP.

The number of routes of every expert is decided first (:func:`expert_counts`, exact, by construction), the table is filled to have
exactly these counts afterwards (:func:`expert_ids`). So the counts are an oracle for whatever counts the routes of the table.

Symbols: T tokens of the global batch, K routes a token, E experts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from mok_megatron.errors import MoKArgumentError

GROUPS = 8
_BURST_PERIOD = 4


def _rng(name: str, seed: int, step: int, purpose: str) -> random.Random:
    """A generator that depends on its arguments only (a string seed is hashed by SHA-512, the same in every process)."""
    return random.Random(f"{name}/{seed}/{step}/{purpose}")


def _share(total: int, weights: Sequence[float], cap: int) -> list[int]:
    """Whole numbers proportional to ``weights`` (largest remainders first), none above ``cap``, which sum to ``total``."""
    counts = [0] * len(weights)
    left = total
    while left:
        open_to = [i for i, weight in enumerate(weights) if weight > 0 and counts[i] < cap]
        if not open_to:  # every wanted one is full: the rest goes wherever there is room
            weights = [1.0] * len(weights)
            continue
        scale = left / sum(weights[i] for i in open_to)
        quotas = {i: min(weights[i] * scale, cap - counts[i]) for i in open_to}
        added = {i: int(quota) for i, quota in quotas.items()}
        over = left - sum(added.values())
        if over <= len(open_to):  # little but fractions is left: hand them out, largest first
            for i in sorted(open_to, key=lambda i: (added[i] - quotas[i], i))[:over]:
                if counts[i] + added[i] < cap:
                    added[i] += 1
        for i, count in added.items():
            counts[i] += count
            left -= count
    return counts


def _groups(num_experts: int) -> list[list[int]]:
    """Experts by group; with fewer experts than groups, one expert a group."""
    groups = min(GROUPS, num_experts)
    return [list(range(num_experts * g // groups, num_experts * (g + 1) // groups)) for g in range(groups)]


def _lift(num_experts: int, hot: Sequence[int], hot_share: float) -> list[float]:
    """Weights by which the experts of ``hot`` share ``hot_share`` of all routes evenly and the others the rest."""
    cold = num_experts - len(set(hot))
    rest = (1.0 - hot_share) / cold if cold else 0.0
    return [hot_share / len(hot) if e in set(hot) else rest for e in range(num_experts)]


def _balanced(num_experts: int, topk: int, seed: int, step: int) -> list[float]:
    return [1.0] * num_experts


def _hot_experts(num_experts: int, topk: int, seed: int, step: int) -> list[float]:
    hot = _rng("hot_experts", seed, 0, "set").sample(range(num_experts), max(topk, num_experts // 8))
    return _lift(num_experts, hot, 0.8)


def _hot_rank(num_experts: int, topk: int, seed: int, step: int) -> list[float]:
    return _lift(num_experts, _rng("hot_rank", seed, 0, "group").choice(_groups(num_experts)), 0.75)


def _spread_hot(num_experts: int, topk: int, seed: int, step: int) -> list[float]:
    rng = _rng("spread_hot", seed, 0, "set")
    return _lift(num_experts, [rng.choice(group) for group in _groups(num_experts)], 0.75)


def _ragged_source(num_experts: int, topk: int, seed: int, step: int) -> list[float]:
    rng = _rng("ragged_source", seed, step, "weights")
    return [0.5 + rng.random() for _ in range(num_experts)]


def _zero_expert_and_rank(num_experts: int, topk: int, seed: int, step: int) -> list[float]:
    """The upper half of the experts (a whole rank at every EP from 2 on) and one expert of the lower half get nothing."""
    half = num_experts // 2
    weights = [1.0] * half + [0.0] * (num_experts - half)
    if half > topk:
        weights[_rng("zero_expert_and_rank", seed, 0, "expert").randrange(half)] = 0.0
    return weights


def _rotating_hotspot(num_experts: int, topk: int, seed: int, step: int) -> list[float]:
    groups = _groups(num_experts)
    start = _rng("rotating_hotspot", seed, 0, "start").randrange(len(groups))
    return _lift(num_experts, groups[(start + step) % len(groups)], 0.75)


def _burst(num_experts: int, topk: int, seed: int, step: int) -> list[float]:
    """Balanced, but for one step in four, when every token takes the same expert beside K - 1 others."""
    if (step + seed) % _BURST_PERIOD:
        return [1.0] * num_experts
    return _lift(num_experts, [_rng("burst", seed, step, "expert").randrange(num_experts)], 0.95)


_WEIGHTS: dict[str, Callable[[int, int, int, int], list[float]]] = {
    "balanced": _balanced,
    "hot_experts": _hot_experts,
    "hot_rank": _hot_rank,
    "spread_hot": _spread_hot,
    "ragged_source": _ragged_source,
    "zero_expert_and_rank": _zero_expert_and_rank,
    "rotating_hotspot": _rotating_hotspot,
    "burst": _burst,
}
WORKLOADS: tuple[str, ...] = tuple(_WEIGHTS)


def _check(name: str, num_tokens: int, num_experts: int, topk: int) -> None:
    if name not in _WEIGHTS:
        raise MoKArgumentError(f"name={name!r}: must be one of {', '.join(WORKLOADS)}")
    if num_tokens < 0:
        raise MoKArgumentError(f"num_tokens={num_tokens}: must not be negative")
    if not 1 <= topk <= num_experts:
        raise MoKArgumentError(f"topk={topk}: must be between 1 and num_experts={num_experts}")


def expert_counts(name: str, *, seed: int, step: int, num_tokens: int, num_experts: int, topk: int) -> list[int]:
    """Routes of every expert in this step: E whole numbers that sum to T*K, none above T (a token takes an expert once).

    Raises:
        MoKArgumentError: unknown name, or a shape that no table can have.
    """
    _check(name, num_tokens, num_experts, topk)
    return _share(num_tokens * topk, _WEIGHTS[name](num_experts, topk, seed, step), num_tokens)


def expert_ids(name: str, *, seed: int, step: int, num_tokens: int, num_experts: int, topk: int) -> torch.Tensor:
    """Routes of the global batch: int32 [T, K], expert ids ascending in each row, no id twice in a row.

    Raises:
        MoKArgumentError: unknown name, or a shape that no table can have.
    """
    counts = expert_counts(name, seed=seed, step=step, num_tokens=num_tokens, num_experts=num_experts, topk=topk)
    rng = _rng(name, seed, step, "table")
    order = list(range(num_experts))
    rng.shuffle(order)
    # All routes, expert by expert, dealt to the tokens in turn: an expert's routes are at most T neighbours, hence for different tokens.
    dealt = torch.tensor([e for e in order for _ in range(counts[e])], dtype=torch.int32).reshape(topk, num_tokens).T
    places = list(range(num_tokens))
    rng.shuffle(places)
    return dealt[torch.tensor(places, dtype=torch.int64)].sort(1).values.contiguous()


def source_tokens(name: str, *, seed: int, step: int, num_tokens: int, ep_size: int) -> list[int]:
    """Tokens that each of ``ep_size`` ranks brings, in the order of the global list; they sum to T.

    Even, but for ``ragged_source``, where the segments differ widely and at least one of them is empty.

    Raises:
        MoKArgumentError: ep_size does not divide ``GROUPS``.
    """
    _check(name, num_tokens, 1, 1)
    if ep_size < 1 or GROUPS % ep_size:
        raise MoKArgumentError(f"ep_size={ep_size}: must divide {GROUPS}")
    weights = [1.0] * GROUPS
    if name == "ragged_source":
        rng = _rng(name, seed, step, "segments")
        weights = [rng.random() ** 2 for _ in range(GROUPS)]
        weights[rng.randrange(GROUPS)] = 0.0
    segments = _share(num_tokens, weights, num_tokens)
    width = GROUPS // ep_size
    return [sum(segments[r * width : (r + 1) * width]) for r in range(ep_size)]
