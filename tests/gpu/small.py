"""Small passes for compute-sanitizer: python -m tests.gpu.small.

One rank: under the tool, kernels of several ranks in one process did not come to an end, since they wait for each other.
"""

import torch

from tests.gpu import harness

TOKENS, TOPK, HIDDEN, INNER, EXPERTS = 150, 2, 128, 192, 4


def main() -> None:
    harness.TIMEOUT_SECONDS = 60.0  # instrumented kernels are slow
    group = harness.Group(1, TOKENS, TOPK, HIDDEN, INNER, EXPERTS, minibatch=128, macrobatch=256)
    problem = harness.random_problem([TOKENS], HIDDEN, INNER, EXPERTS, TOPK, seed=1, missing=0.1)
    (first,), _, _ = group.forward(problem)
    (second,), _, _ = group.forward(problem, save=True)
    assert torch.isfinite(first).all()
    assert torch.equal(first, second)
    print("finite, and the same bits twice")


if __name__ == "__main__":
    main()
