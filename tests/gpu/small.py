"""Small passes, forward and backward, for compute-sanitizer: python -m tests.gpu.small [RANKS].

One rank runs in this process. Two are a process each on a GPU each, since under the tool kernels of one process run one after the other, and
those of two ranks wait for each other.
"""

import sys

import torch
import torch.distributed as dist

from tests.distributed import run_ranks
from tests.gpu import harness
from tests.gpu.backward_runs import Pass, random_dy

TOKENS, TOPK, HIDDEN, INNER, EXPERTS = 150, 2, 128, 192, 4


def one_rank() -> None:
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


def _rank(rank: int, ranks: int) -> None:
    from mok_megatron import MoKConfig
    from mok_megatron import functional as mok

    torch.cuda.set_device(rank)
    config = MoKConfig(minibatch_size=128, macrobatch_size=256, timeout_seconds=120.0)
    workspace = mok.get_workspace(
        config,
        dist.group.WORLD,
        device="cuda",
        num_local_tokens=TOKENS,
        hidden_size=HIDDEN,
        topk=TOPK,
        num_local_experts=EXPERTS // ranks,
        intermediate_size=INNER,
        dtype=torch.bfloat16,
    )
    problem = harness.random_problem([TOKENS] * ranks, HIDDEN, INNER, EXPERTS, TOPK, seed=1, missing=0.1)
    local = slice(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks)
    x, p, routes = (values[rank].cuda() for values in (problem.x, problem.router_weights, problem.topk_experts))
    w13, w2, dy = problem.w13[local].cuda(), problem.w2[local].cuda(), random_dy(problem, 2)[rank].cuda()
    results = []
    for _ in range(2):
        schedule = mok.build_schedule(workspace, config, routes)
        y, context = mok.forward(config, workspace, schedule, x, p, w13, w2)
        results.append([y, *mok.backward(config, workspace, schedule, context, dy, x, p, w13, w2)])
    torch.cuda.synchronize()
    for one, other in zip(*results, strict=True):
        assert torch.isfinite(one).all()
        assert torch.equal(one, other)


def main() -> None:
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    if ranks == 1:
        one_rank()
    else:
        run_ranks(_rank, ranks, ranks, timeout=280)
    print("finite, and the same bits twice")


if __name__ == "__main__":
    main()
