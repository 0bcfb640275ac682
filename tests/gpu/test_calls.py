"""What calls cost the host: no wait for the GPU, and no memory beyond what they return."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.distributed import RankPool
from tests.gpu.ranks import EP_SIZES, TOKENS, random_part, start

REPEATS = 40


def _calls(rank: int, ep_size: int, tokens: list[int], seed: int) -> dict[str, tuple[Callable[[], list[Any]], int]]:
    """By name: calls that return what is compared, and how many tensors they make."""
    mok, config, workspace = start(rank, ep_size)
    part = random_part(tokens, seed, rank)
    weights, lists = (part.w13, part.w2), (list(part.w13), list(part.w2))
    sums = tuple(torch.zeros(w.shape, device=w.device) for w in weights)
    written = tuple([torch.empty_like(w) for w in matrices] for matrices in lists)

    def schedule():
        return mok.build_schedule(workspace, config, part.routes)

    def forward(save, made, weights):
        return mok.forward(config, workspace, made, part.x, part.p, *weights, save_context=save)

    def train(weights, **grads):
        made = schedule()
        y, context = forward(True, made, weights)
        return [y, *(t for t in mok.backward(config, workspace, made, context, part.dy, part.x, part.p, *weights, **grads) if t is not None)]

    def recompute():
        made = schedule()
        context = mok.recompute_forward_context(config, workspace, made, part.x, part.p, part.w13)
        return [mok.backward(config, workspace, made, context, part.dy, part.x, part.p, *weights, main_grads=(None, None))[0]]

    # A schedule is one tensor, a context two, y, dx and d_router_weights one each.
    return {
        "forward": (lambda: [forward(False, schedule(), weights)[0]], 2),
        "forward, weights as lists": (lambda: [forward(False, schedule(), lists)[0]], 2),
        "into main_grads": (lambda: train(weights, main_grads=sums), 6),
        "over main_grads, lists": (lambda: train(lists, main_grads=written, overwrite_main_grads=(True, True)), 6),
        "new gradients": (lambda: train(weights), 8),
        "recompute": (recompute, 5),
    }


def _run(rank: int, ep_size: int, tokens: list[int], seed: int) -> None:
    for name, (call, made) in _calls(rank, ep_size, tokens, seed).items():
        first = [t.clone() for t in call()]
        kept = [call() for _ in range(REPEATS)]
        torch.cuda.synchronize()
        del kept  # the allocator has room now
        counted = torch.cuda.memory_stats()["allocation.all.allocated"]
        free, _ = torch.cuda.mem_get_info()
        torch.cuda.set_sync_debug_mode("error")
        try:
            # The host runs ahead of a GPU that starts late.
            torch.cuda._sleep(int(5e8))
            begin = time.monotonic()
            outputs = [call() for _ in range(REPEATS)]
            ahead = time.monotonic() - begin
        finally:
            torch.cuda.set_sync_debug_mode("default")
        pending = not torch.cuda.current_stream().query()
        counted = torch.cuda.memory_stats()["allocation.all.allocated"] - counted
        torch.cuda.synchronize()
        assert pending, f"{name}: {REPEATS} calls took the host {ahead:.3f} s: it waited for the GPU"
        assert counted == REPEATS * made, f"{name}: {counted} tensors made by {REPEATS} calls"
        left, _ = torch.cuda.mem_get_info()
        assert left >= free, f"{name}: {free - left} bytes of the GPU's memory went past the allocator"
        for got in outputs:
            assert all(torch.equal(a, b) for a, b in zip(got, first, strict=True)), name


@pytest.mark.parametrize("ep_size", EP_SIZES)
def test_no_host_synchronisation_and_no_hidden_allocation(ranks2: RankPool, ep_size: int, seed: int) -> None:
    ranks2.run(_run, ep_size, [TOKENS // ep_size] * ep_size, seed, ranks=ep_size, timeout=120)
