"""backward and recompute_forward_context on GPUs: one process a rank over NCCL and torch symmetric memory."""

import pytest
import torch

from tests.distributed import run_ranks
from tests.gpu.harness import poison
from tests.gpu.test_functional import EXPERTS, HIDDEN, INNER, TOPK, _split, _start, two_gpus
from tests.oracle import assert_within, moe_oracle

NAMES = ("dx", "d_router_weights", "dw13", "dw2")


def _run(rank: int, ep_size: int, tokens: list[int], seed: int, knobs: dict) -> list[list[torch.Tensor]]:
    mok, config, workspace = _start(rank, ep_size, **knobs)
    for tensor in (workspace.mine.dy, workspace.mine.d_router_weights):
        poison(tensor)
    torch.cuda.synchronize()
    if ep_size > 1:
        torch.distributed.barrier(workspace.group)
    results = []
    for step in range(3):
        (routes, x, p), weights, _ = _split(tokens, seed + step, ep_size, rank)
        dy = _dy(sum(tokens), seed + step)[sum(tokens[:rank]) : sum(tokens[: rank + 1])].cuda()
        schedule = mok.build_schedule(workspace, config, routes)
        if step == 2:
            context = mok.recompute_forward_context(config, workspace, schedule, x, p, weights[0])
        else:
            context = mok.forward(config, workspace, schedule, x, p, *weights)[1]
        if step == 1:
            grads = tuple([torch.zeros(w.shape, device="cuda") for w in matrices] for matrices in weights)
            weights = [list(matrices) for matrices in weights]
            dx, dp, none13, none2 = mok.backward(config, workspace, schedule, context, dy, x, p, *weights, main_grads=grads)
            assert none13 is None
            assert none2 is None
            dw13, dw2 = (torch.stack(g) for g in grads)
        else:
            dx, dp, dw13, dw2 = mok.backward(config, workspace, schedule, context, dy, x, p, *weights)
        results.append([t.cpu() for t in (dx, dp, dw13, dw2)])
    return results


def _dy(tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed + 1000)).bfloat16()


def _joined(ranks: list[list[list[torch.Tensor]]], step: int) -> list[torch.Tensor]:
    return [torch.cat([results[step][i] for results in ranks]) for i in range(len(NAMES))]


def _check(tokens: list[int], seed: int, step: int, got: list[torch.Tensor]) -> None:
    _, _, problem = _split([sum(tokens)], seed + step, 1, 0)
    want = moe_oracle(
        problem.x[0],
        problem.router_weights[0],
        problem.topk_experts[0],
        problem.w13,
        problem.w2,
        _dy(sum(tokens), seed + step),
        dtype=torch.bfloat16,
        grad_dtype=torch.float32 if step == 1 else torch.bfloat16,
    )
    assert got[1].shape == (sum(tokens), TOPK)
    assert got[2].shape == (EXPERTS, 2 * INNER, HIDDEN)
    for name, tensor in zip(NAMES, got, strict=True):
        assert_within(name, tensor, getattr(want, name))


def test_one_rank(seed):
    ranks = run_ranks(_run, 1, 1, [300], seed, {}, timeout=120)
    for step in range(3):
        _check([300], seed, step, _joined(ranks, step))


@two_gpus
@pytest.mark.parametrize(("tokens", "knobs"), [([150, 150], {}), ([293, 7], {"minibatch_size": 128, "macrobatch_size": 256})])
def test_two_ranks_equal_one_bit_for_bit(tokens, knobs, seed):
    one = run_ranks(_run, 1, 1, [300], seed, {}, timeout=120)
    two = run_ranks(_run, 2, 2, tokens, seed, knobs, timeout=120)
    for step in range(3):
        joined = _joined(two, step)
        _check(tokens, seed, step, joined)
        for name, a, b in zip(NAMES, joined, _joined(one, step), strict=True):
            assert torch.equal(a, b), (step, name)
