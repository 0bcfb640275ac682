"""The routes of a call by one launch, against torch's operators on the same GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, not installed here")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("tokens", "experts", "topk"), [(4096, 128, 8), (33, 384, 8), (7, 8, 8), (5, 6, 1), (0, 16, 2), (1, 512, 32)])
def test_the_same_bits(tokens: int, experts: int, topk: int, dtype: torch.dtype, seed: int) -> None:
    from mok_megatron.megatron import router, router_kernels

    generator = torch.Generator("cuda").manual_seed(seed)
    probs = torch.rand(tokens, experts, device="cuda", generator=generator).to(dtype)
    scores = torch.rand(tokens, experts, device="cuda", generator=generator)
    kept = torch.randint(topk + 1, (tokens, 1), device="cuda", generator=generator)
    routing_map = scores.argsort(dim=1).argsort(dim=1) < kept
    grad = torch.randn(tokens, topk, device="cuda", generator=generator)
    leaf, other = probs.clone().requires_grad_(True), probs.clone().requires_grad_(True)
    ids, weights = router_kernels.routes_and_weights(leaf, routing_map, topk)
    weights.backward(grad)
    wanted_ids = router.compact_routes(routing_map, topk)
    wanted = router.gather_router_weights(other, wanted_ids)
    wanted.backward(grad)
    assert torch.equal(ids, wanted_ids) and torch.equal(weights, wanted) and torch.equal(leaf.grad, other.grad)


def test_a_row_with_too_many_routes_becomes_an_id_that_no_group_has() -> None:
    from mok_megatron.megatron import router

    routing_map = torch.ones(2, 8, dtype=torch.bool, device="cuda")
    routing_map[0, 3:] = False
    ids, _ = router.routes_and_weights(torch.rand(2, 8, device="cuda"), routing_map, 3)
    assert ids.tolist() == [[0, 1, 2], [8, 1, 2]]
