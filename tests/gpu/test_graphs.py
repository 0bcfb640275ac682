"""CUDA graphs of whole passes: replays follow routes and inputs, whenever the peers arrive, and equal eager calls bit for bit."""

import pytest
import torch

from tests.distributed import RankPool
from tests.gpu.backward_runs import assert_same_bits
from tests.gpu.ranks import EP_SIZES, TOKENS, poison_shared, random_part, start

REPLAYS = 10
NAMES = ("y without context", "y", "dx", "d_router_weights", "dw13", "dw2")


def _replay(rank: int, ep_size: int, tokens: list[int], seed: int, knobs: dict) -> None:
    mok, config, workspace = start(rank, ep_size, **knobs)
    part = random_part(tokens, seed, rank)
    weights = (part.w13, part.w2)

    def forward() -> torch.Tensor:
        schedule = mok.build_schedule(workspace, config, part.routes)
        return mok.forward(config, workspace, schedule, part.x, part.p, *weights, save_context=False)[0]

    def train(grads: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
        schedule = mok.build_schedule(workspace, config, part.routes)
        y, context = mok.forward(config, workspace, schedule, part.x, part.p, *weights)
        dx, dp, _, _ = mok.backward(config, workspace, schedule, context, part.dy, part.x, part.p, *weights, main_grads=grads)
        return [y, dx, dp]

    captured_grads = tuple(torch.zeros(w.shape, device=w.device) for w in weights)
    torch.cuda.synchronize()
    stream, graphs, made = torch.cuda.Stream(), [], []
    with torch.cuda.stream(stream):
        for call in (forward, lambda: train(captured_grads)):
            call()
            stream.synchronize()
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1], stream=stream):
                results = call()
            made += [results] if isinstance(results, torch.Tensor) else results
    for repeat in range(REPLAYS):
        new = random_part(tokens, seed + 1 + repeat, rank)
        part.copy_tokens(new)
        before = [torch.randn_like(g) for g in captured_grads]
        for grad, value in zip(captured_grads, before, strict=True):
            grad.copy_(value)
        if repeat % 3 == rank:
            torch.cuda._sleep(int(5e7))
        for graph in graphs:
            graph.replay()
        # As soon as this rank is through, whatever its peers still do.
        replayed = [t.clone() for t in (*made, *captured_grads)]
        part.poison_tokens()
        poison_shared(workspace)
        torch.cuda.synchronize()
        part.copy_tokens(new)
        eager_grads = tuple(value.clone() for value in before)
        eager = [forward(), *train(eager_grads), *eager_grads]
        for name, one, other in zip(NAMES, replayed, eager, strict=True):
            assert_same_bits(name, one, other, f"replay {repeat} and the eager call")


@pytest.mark.parametrize("ep_size", EP_SIZES)
@pytest.mark.parametrize("knobs", [{}, {"minibatch_size": 128, "macrobatch_size": 256}], ids=["whole", "replayed macrobatches"])
def test_replays_equal_eager_calls(ranks2: RankPool, ep_size: int, knobs: dict, seed: int) -> None:
    ranks2.run(_replay, ep_size, [TOKENS // ep_size] * ep_size, seed, knobs, ranks=ep_size, timeout=120)
