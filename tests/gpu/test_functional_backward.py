"""Where the public backward puts weight gradients on a GPU."""

import torch

from tests.distributed import RankPool
from tests.gpu.backward_runs import NAN
from tests.gpu.ranks import EXPERTS, TOKENS, random_part, start


def _gradient_forms(rank: int, seed: int) -> None:
    """main_grads in every form that the interface takes, each of them twice, with other addresses the second time."""
    mok, config, workspace = start(rank, 1)
    part = random_part([TOKENS], seed, 0)
    schedule = mok.build_schedule(workspace, config, part.routes)
    weights = (list(part.w13), list(part.w2))
    _, context = mok.forward(config, workspace, schedule, part.x, part.p, *weights)

    def backward(**grads):
        return mok.backward(config, workspace, schedule, context, part.dy, part.x, part.p, *weights, **grads)

    shapes = tuple(w.shape for w in (part.w13, part.w2))
    sums = tuple(torch.full(s, NAN, device=part.x.device) for s in shapes)
    dx, dp, _, _ = backward(main_grads=sums, overwrite_main_grads=(True, True))
    fresh = backward()
    for made, total in zip(fresh[2:], sums, strict=True):
        assert isinstance(made, list)
        assert torch.equal(torch.stack(made), total.bfloat16())
    generator = torch.Generator().manual_seed(seed)
    kept = []
    mixed = [e % 3 == 0 for e in range(EXPERTS)]
    for as_list in (False, True):
        for dtypes in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)):
            for overwrite in ((False, False), (True, False), (mixed, True), (mixed, mixed[::-1])):
                for _ in range(2):
                    starts = [torch.randn(s, generator=generator).to(d) for s, d in zip(shapes, dtypes, strict=True)]
                    grads = [s.clone().to(part.x.device) for s in starts]
                    kept.append(grads)
                    passed = tuple(list(g) if as_list else g for g in grads)
                    got = backward(main_grads=passed, overwrite_main_grads=overwrite)
                    assert torch.equal(got[0], dx)
                    assert torch.equal(got[1], dp)
                    for before, after, total, flags in zip(starts, grads, sums, overwrite, strict=True):
                        over = torch.tensor([flags] * EXPERTS if isinstance(flags, bool) else flags)[:, None, None]
                        total = total.cpu()
                        want = torch.where(over, total, before.float() + total).to(before.dtype)
                        assert torch.equal(after.cpu(), want), (as_list, dtypes, overwrite)
    # No gradient for one of the two, and for some experts.
    part13 = [None if e % 2 else torch.ones(shapes[0][1:], device=part.x.device) for e in range(EXPERTS)]
    backward(main_grads=(part13, None))
    for expert, grad in enumerate(part13):
        assert grad is None or torch.equal(grad, sums[0][expert] + 1.0), expert


def test_every_form_of_main_grads(ranks2: RankPool, seed: int) -> None:
    ranks2.run(_gradient_forms, seed, ranks=1, timeout=120)
