"""Routes out of Megatron's router: a boolean map and dense probabilities in, K slots a token out.

T local tokens, E experts, K routes a token. The slots of a token are in ascending expert id and compacted from the map: ``topk``
over a 0/1 map has no defined order among ties, and probabilities cannot tell a chosen expert with probability 0 from another.
"""

from __future__ import annotations

import torch
from torch import Tensor


def routes_and_weights(probs: Tensor, routing_map: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """:func:`compact_routes` and :func:`gather_router_weights` of them; on a GPU one launch each way.

    Args:
        probs: [T, E], any floating dtype, differentiable.
        routing_map: [T, E] bool.
        topk: K.

    Returns:
        Expert ids [T, K] int32 and their probabilities [T, K] fp32.
    """
    if probs.is_cuda:
        from mok_megatron.megatron import router_kernels  # which needs the compiled kernels

        return router_kernels.routes_and_weights(probs, routing_map, topk)
    topk_experts = compact_routes(routing_map, topk)
    return topk_experts, gather_router_weights(probs, topk_experts)


def compact_routes(routing_map: Tensor, topk: int) -> Tensor:
    """Expert ids of each token's routes, ascending, -1 where a token has fewer than K.

    A row with more than K routes cannot be kept and must not be cut: its first slot becomes the id E, which no group has, so that
    building the schedule refuses it on every rank of the group. No host synchronisation.

    Args:
        routing_map: [T, E] bool (or integers, nonzero = route).
        topk: K.

    Returns:
        [T, K] int32.
    """
    num_tokens, num_experts = routing_map.shape
    chosen = routing_map.bool()
    # Position of each route within its row; what is no route or is beyond K goes to a column that is cut off.
    position = chosen.cumsum(dim=1, dtype=torch.int32) - 1
    column = torch.where(chosen, position, topk).clamp_(max=topk).long()
    expert = torch.arange(num_experts, dtype=torch.int32, device=chosen.device).expand(num_tokens, num_experts)
    ids = torch.full((num_tokens, topk + 1), -1, dtype=torch.int32, device=chosen.device)
    ids.scatter_(1, column, expert)
    ids = ids[:, :topk].contiguous()
    if num_experts > topk:
        too_many = chosen.sum(dim=1) > topk
        ids[:, 0] = torch.where(too_many, num_experts, ids[:, 0])
    return ids


def describe_overfull_rows(routing_map: Tensor, topk: int) -> str | None:
    """Text that names the first row with more than K routes, None if there is none. Synchronises: for error paths."""
    routes = routing_map.bool().sum(dim=1)
    rows = (routes > topk).nonzero().flatten()
    if rows.numel() == 0:
        return None
    first = int(rows[0])
    return (
        f"routing_map: token {first} has {int(routes[first])} routes where at most K = {topk} are allowed "
        f"({rows.numel()} such tokens on this rank)"
    )


def gather_router_weights(probs: Tensor, topk_experts: Tensor) -> Tensor:
    """The routes' probabilities, differentiable: the gradient reaches ``probs`` in its own dtype, 0 where there is no route.

    Args:
        probs: [T, E], any floating dtype.
        topk_experts: [T, K]; slots outside 0..E-1 have no weight.

    Returns:
        [T, K] fp32, exactly 0 in slots without a route.
    """
    num_experts = probs.shape[1]
    valid = (topk_experts >= 0) & (topk_experts < num_experts)
    index = topk_experts.clamp(0, num_experts - 1).long()
    gathered = probs.gather(1, index)
    # where(), not a product: a NaN probability next to an empty slot must reach neither the weight nor the gradient.
    return torch.where(valid, gathered, torch.zeros((), dtype=probs.dtype, device=probs.device)).float()
