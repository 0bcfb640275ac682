"""The routes of a call by one launch, against torch's operators on the same GPU."""

from __future__ import annotations

import pytest
import torch

SHAPES = [(4096, 128, 8), (33, 384, 8), (7, 8, 8), (5, 6, 1), (0, 16, 2), (1, 512, 32), (9, 33, 5), (17, 1, 1)]


def random_routes(tokens: int, experts: int, topk: int, generator: torch.Generator) -> torch.Tensor:
    """Rows with 0 to K routes."""
    scores = torch.rand(tokens, experts, device="cuda", generator=generator)
    kept = torch.randint(topk + 1, (tokens, 1), device="cuda", generator=generator)
    return scores.argsort(dim=1).argsort(dim=1) < kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("tokens", "experts", "topk"), SHAPES)
def test_the_same_bits(tokens: int, experts: int, topk: int, dtype: torch.dtype, seed: int) -> None:
    from mok_megatron.megatron import router, router_kernels

    generator = torch.Generator("cuda").manual_seed(seed)
    probs = torch.rand(tokens, experts, device="cuda", generator=generator).to(dtype)
    routing_map = random_routes(tokens, experts, topk, generator)
    # What is no route must reach nothing.
    probs[~routing_map] = float("nan")
    grad = torch.randn(tokens, topk, device="cuda", generator=generator)
    leaf, other = probs.clone().requires_grad_(True), probs.clone().requires_grad_(True)
    ids, weights = router_kernels.routes_and_weights(leaf, routing_map, topk)
    weights.backward(grad)
    wanted_ids = router.compact_routes(routing_map, topk)
    wanted = router.gather_router_weights(other, wanted_ids)
    wanted.backward(grad)
    for name, got, want in (("ids", ids, wanted_ids), ("weights", weights, wanted), ("gradient", leaf.grad, other.grad)):
        assert got.dtype == want.dtype and torch.equal(got, want), name


def test_a_row_with_too_many_routes_becomes_an_id_that_no_group_has() -> None:
    from mok_megatron.megatron import router

    for experts, topk in ((8, 3), (70, 32)):
        routing_map = torch.ones(2, experts, dtype=torch.bool, device="cuda")
        routing_map[0, topk:] = False
        ids, _ = router.routes_and_weights(torch.rand(2, experts, device="cuda"), routing_map, topk)
        assert ids.tolist() == [list(range(topk)), [experts, *range(1, topk)]]


def test_the_current_stream_is_used(seed: int) -> None:
    """On a side stream behind a long wait: inputs that the stream has yet to write are not read before."""
    from mok_megatron.megatron import router, router_kernels

    generator = torch.Generator("cuda").manual_seed(seed)
    probs, routing_map = torch.rand(64, 40, device="cuda", generator=generator), random_routes(64, 40, 4, generator)
    late, late_map = torch.zeros_like(probs), torch.zeros_like(routing_map)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(probs)
        late_map.copy_(routing_map)
        ids, weights = router_kernels.routes_and_weights(late, late_map, 4)
    torch.cuda.synchronize()
    assert torch.equal(ids, router.compact_routes(routing_map, 4))
    assert torch.equal(weights, router.gather_router_weights(probs, ids))
