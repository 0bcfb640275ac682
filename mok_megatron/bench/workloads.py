"""The benchmark's routing workloads by name: random ones from here, constructed ones from ``routing``.

Routes are made for the global batch from (name, seed) alone; :func:`rank_tokens` says how many neighbouring tokens each rank brings.
"""

from __future__ import annotations

import torch

from mok_megatron.bench import routing
from mok_megatron.errors import MoKArgumentError

_CONSTRUCTED = {"balanced": "balanced", "hot_rank": "hot_rank", "ragged": "ragged_source"}
_EXPONENTS = {"uniform": 0.0, "zipf_0.5": 0.5, "zipf_1.0": 1.0, "zipf_1.5": 1.5, "hot_expert": 0.0}
WORKLOADS: tuple[str, ...] = (
    "balanced",
    "uniform",
    "zipf_0.5",
    "zipf_1.0",
    "zipf_1.5",
    "hot_expert",
    "hot_rank",
    "ragged",
)


def check_workload(name: str) -> None:
    """Raises MoKArgumentError for an unknown name."""
    if name not in WORKLOADS:
        raise MoKArgumentError(f"workload={name!r}: must be one of {', '.join(WORKLOADS)}")


def expert_ids(name: str, *, seed: int, num_tokens: int, num_experts: int, topk: int) -> torch.Tensor:
    """Routes of the global batch: int32 [T, K], ids ascending in each row, no id twice in a row.

    balanced: every expert the same number of routes. uniform: K experts of each token at random, which is not balanced. zipf_s: expert of
    rank r has weight r^-s, experts in random order, K drawn without replacement. hot_expert: every token takes one and the same expert
    beside K - 1 random ones. hot_rank: three quarters of all routes go to an eighth of the experts, neighbours. ragged: ranks bring
    different numbers of tokens, one of eight segments is empty.

    Raises:
        MoKArgumentError: unknown name, or a shape that no table can have.
    """
    check_workload(name)
    if not 1 <= topk <= num_experts:
        raise MoKArgumentError(f"topk={topk}: must be between 1 and num_experts={num_experts}")
    if name in _CONSTRUCTED:
        return routing.expert_ids(_CONSTRUCTED[name], seed=seed, step=0, num_tokens=num_tokens, num_experts=num_experts, topk=topk)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(num_experts, generator=generator)
    log_weights = torch.empty(num_experts)
    log_weights[order] = -_EXPONENTS[name] * torch.arange(1, num_experts + 1, dtype=torch.float32).log()
    if name == "hot_expert":
        log_weights[order[0]] = float("inf")
    # The K largest of log-weight plus Gumbel noise are K draws without replacement, proportional to the weights.
    uniform = torch.rand(num_tokens, num_experts, generator=generator).clamp_(1e-20, 1 - 1e-7)
    scores = log_weights - (-uniform.log()).log()
    return scores.topk(topk, dim=1).indices.sort(dim=1).values.to(torch.int32).contiguous()


def rank_tokens(name: str, *, seed: int, num_tokens: int, ep_size: int) -> list[int]:
    """Tokens that each rank brings; they sum to num_tokens and are even but for ``ragged``.

    Raises:
        MoKArgumentError: unknown name, or ep_size is not 1, 2, 4 or 8.
    """
    check_workload(name)
    return routing.source_tokens(_CONSTRUCTED.get(name, "balanced"), seed=seed, step=0, num_tokens=num_tokens, ep_size=ep_size)


def dealt_routes(expert_rows: list[int], topk: int) -> torch.Tensor:
    """Routes [T, K] that give every expert the number of rows in ``expert_rows``, with as few tokens as that takes; -1 = no route.

    Used to run a rank's own share of the work with nobody else: same rows an expert, other tokens.
    """
    total = sum(expert_rows)
    tokens = max([-(-total // topk), *expert_rows])
    routes = torch.full((tokens * topk,), -1, dtype=torch.int32)
    routes[:total] = torch.repeat_interleave(torch.arange(len(expert_rows), dtype=torch.int32), torch.tensor(expert_rows))
    # An expert's routes are neighbours, at most T of them: column by column, no token gets the same expert twice.
    table = routes.view(topk, tokens).T
    # Ascending as everywhere, the empty slots last.
    ordered = torch.where(table < 0, len(expert_rows), table).sort(dim=1).values
    return torch.where(ordered == len(expert_rows), -1, ordered).contiguous()
