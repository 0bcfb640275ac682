"""Run by test_router.py in a process of its own: the kernels' arithmetic in Triton's interpreter against torch's operators."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import sys

import torch

from mok_megatron.megatron import router, router_kernels


def main() -> None:
    generator = torch.Generator().manual_seed(int(sys.argv[1]))
    for tokens, experts, topk, dtype in (
        (37, 12, 4, torch.float32),
        (5, 128, 8, torch.bfloat16),
        (3, 8, 8, torch.float64),
        (0, 8, 2, torch.float32),
    ):
        probs = torch.rand(tokens, experts, generator=generator).to(dtype)
        routing_map = torch.zeros(tokens, experts, dtype=torch.bool)
        for row in routing_map:
            count = int(torch.randint(topk + 1, (), generator=generator))
            row[torch.randperm(experts, generator=generator)[:count]] = True
        grad = torch.randn(tokens, topk, generator=generator)
        found = []
        for routes_and_weights in (router.routes_and_weights, router_kernels.routes_and_weights):
            leaf = probs.clone().requires_grad_(True)
            ids, weights = routes_and_weights(leaf, routing_map, topk)
            weights.backward(grad)
            found.append((ids, weights.detach(), leaf.grad))
        for name, wanted, got in zip(("ids", "weights", "gradient"), *found, strict=True):
            assert wanted.dtype == got.dtype and torch.equal(wanted, got), (name, experts, topk)
    routing_map = torch.zeros(2, 8, dtype=torch.bool)
    routing_map[1, 2:6] = True
    ids, _ = router_kernels.routes_and_weights(torch.rand(2, 8), routing_map, 3)
    assert ids.tolist() == [[-1, -1, -1], [8, 3, 4]], ids


if __name__ == "__main__":
    main()
