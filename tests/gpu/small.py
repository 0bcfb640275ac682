"""Small passes, forward and backward, for compute-sanitizer: python -m tests.gpu.small.

One rank: under the tool, kernels of several ranks in one process did not come to an end, since they wait for each other.
"""

import torch

from tests.gpu import harness
from tests.gpu.backward_runs import Pass, random_dy

TOKENS, TOPK, HIDDEN, INNER, EXPERTS = 150, 2, 128, 192, 4


def main() -> None:
    harness.TIMEOUT_SECONDS = 60.0  # instrumented kernels are slow
    group = harness.Group(1, TOKENS, TOPK, HIDDEN, INNER, EXPERTS, minibatch=128, macrobatch=256)
    problem = harness.random_problem([TOKENS], HIDDEN, INNER, EXPERTS, TOPK, seed=1, missing=0.1)
    (first,), _, _ = group.forward(problem)
    run = Pass(group, problem, random_dy(problem, 2))
    (second,), _, _ = group.forward(problem, save=True)
    assert torch.isfinite(first).all()
    assert torch.equal(first, second)
    for dtype, overwrite in ((torch.float32, False), (torch.bfloat16, True), (torch.bfloat16, False)):
        one, other = (run.backward(run.new_grads(dtype, 0.0), overwrite) for _ in range(2))
        for name in one.names():
            assert torch.isfinite(getattr(one, name)).all(), name
            assert torch.equal(getattr(one, name), getattr(other, name)), name
    run.recompute()
    print("finite, and the same bits twice")


if __name__ == "__main__":
    main()
