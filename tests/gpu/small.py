"""Small passes for compute-sanitizer: python -m tests.gpu.small EP. Ranks share a GPU, or have one each where there are enough."""

import sys

import torch

from tests.gpu import harness

TOKENS, TOPK, HIDDEN, INNER, EXPERTS = 150, 2, 128, 192, 4


def main(ep_size: int) -> None:
    harness.TIMEOUT_SECONDS = 60.0  # instrumented kernels are slow
    devices = list(range(ep_size)) if torch.cuda.device_count() >= ep_size else [0] * ep_size
    group = harness.Group(ep_size, TOKENS, TOPK, HIDDEN, INNER, EXPERTS, minibatch=128, macrobatch=256, devices=devices)
    problem = harness.random_problem([TOKENS] * ep_size, HIDDEN, INNER, EXPERTS, TOPK, seed=1, missing=0.1)
    first, _, _ = group.forward(problem)
    second, _, _ = group.forward(problem, save=True)
    for one, other in zip(first, second, strict=True):
        assert torch.isfinite(one).all()
        assert torch.equal(one, other)
    print(f"{ep_size} ranks on GPUs {devices}: finite, and the same bits twice")


if __name__ == "__main__":
    main(int(sys.argv[1]))
