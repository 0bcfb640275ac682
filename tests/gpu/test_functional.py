"""The public functions on GPUs, forward and backward: one process a rank over NCCL and torch symmetric memory."""

import pytest
import torch

from tests.distributed import RankPool
from tests.gpu.backward_runs import assert_same_bits
from tests.gpu.harness import expected
from tests.gpu.ranks import EXPERTS, HIDDEN, INNER, TOKENS, TOPK, batch, random_part, start, two_gpus
from tests.oracle import assert_within

NAMES = ("y", "dx", "d_router_weights", "dw13", "dw2")
STEPS = 3  # gradients in new bf16 tensors; added to fp32 ones, lists; from a context that is made again


def _run(rank: int, ep_size: int, tokens: list[int], seed: int, knobs: dict) -> list[list[torch.Tensor]]:
    mok, config, workspace = start(rank, ep_size, **knobs)
    results = []
    for step in range(STEPS):
        part = random_part(tokens, seed + step, rank)
        schedule = mok.build_schedule(workspace, config, part.routes)
        tokens_of = (part.x, part.p)
        y, context = mok.forward(config, workspace, schedule, *tokens_of, part.w13, part.w2, save_context=step != 2)
        assert (context is None) == (step == 2)
        if step == 2:
            context = mok.recompute_forward_context(config, workspace, schedule, *tokens_of, part.w13)
        operands = (config, workspace, schedule, context, part.dy, *tokens_of)
        if step == 1:
            grads = tuple([torch.zeros(w.shape, device=w.device) for w in matrices] for matrices in (part.w13, part.w2))
            dx, dp, none13, none2 = mok.backward(*operands, list(part.w13), list(part.w2), main_grads=grads)
            assert none13 is None
            assert none2 is None
            dw13, dw2 = (torch.stack(g) for g in grads)
        else:
            dx, dp, dw13, dw2 = mok.backward(*operands, part.w13, part.w2)
        results.append([t.cpu() for t in (y, dx, dp, dw13, dw2)])
    return results


def _joined(ranks: list[list[list[torch.Tensor]]], step: int) -> list[torch.Tensor]:
    return [torch.cat([results[step][i] for results in ranks]) for i in range(len(NAMES))]


def _check(tokens: int, seed: int, step: int, got: list[torch.Tensor]) -> None:
    problem, dy = batch(tokens, seed + step)
    want = expected(problem, [dy], grad_dtype=torch.float32 if step == 1 else torch.bfloat16)
    assert got[2].shape == (tokens, TOPK)
    assert got[3].shape == (EXPERTS, 2 * INNER, HIDDEN)
    for name, tensor in zip(NAMES, got, strict=True):
        assert_within(name, tensor, getattr(want, name))


def test_one_rank(ranks2: RankPool, seed: int) -> None:
    ranks = ranks2.run(_run, 1, [TOKENS], seed, {}, ranks=1, timeout=120)
    for step in range(STEPS):
        _check(TOKENS, seed, step, _joined(ranks, step))


@two_gpus
@pytest.mark.parametrize(
    ("tokens", "knobs"),
    [
        ([150, 150], {}),
        ([300, 0], {}),
        ([0, 300], {"minibatch_size": 128, "macrobatch_size": 128, "sm_reserve": 100}),
        ([293, 7], {"minibatch_size": 128, "macrobatch_size": 256, "fwd_num_comm_sms": 16}),
    ],
)
def test_two_ranks_equal_one_bit_for_bit(ranks2: RankPool, tokens: list[int], knobs: dict, seed: int) -> None:
    one = ranks2.run(_run, 1, [TOKENS], seed, {}, ranks=1, timeout=120)
    two = ranks2.run(_run, 2, tokens, seed, knobs, timeout=120)
    for step in range(STEPS):
        joined = _joined(two, step)
        _check(TOKENS, seed, step, joined)
        for name, a, b in zip(NAMES, joined, _joined(one, step), strict=True):
            assert_same_bits(name, a, b, step)
