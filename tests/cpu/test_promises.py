"""P1, P2, P3 of the design, bit for bit.

P1: the same inputs and config give the same bits in every output and gradient, every run.
P2: y, dx and d_router_weights do not change with minibatch, macrobatch, communication SMs or EP size, nor with other tokens' values.
P3: weight gradients do not change with minibatch, macrobatch, communication SMs or EP size.

The CPU executor has no SMs; what they do is looked at in tests/gpu.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.cpu.problems import Batch, Result, Run, assert_same_bits, even_tokens, execute, random_batch
from tests.distributed import RankPool

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
CONFIGS = [
    {"minibatch_size": 128, "macrobatch_size": 128},
    {"minibatch_size": 128, "macrobatch_size": 256},
    {"minibatch_size": 256, "macrobatch_size": 512},
    {"minibatch_size": 384, "macrobatch_size": 384},
    {"minibatch_size": 128},
    {"macrobatch_size": 640},
]


def _batch(seed: int, dtype: torch.dtype) -> Batch:
    """Experts of 1 to some 400 rows, so that experts straddle every ring and minibatch boundary."""
    tokens = 601
    routes = torch.full((tokens, 2), -1, dtype=torch.int32)
    generator = torch.Generator().manual_seed(seed)
    heavy = torch.rand(tokens, generator=generator) < 0.6
    routes[:, 0] = torch.where(heavy, 1, torch.randint(2, 4, (tokens,), generator=generator).int())
    routes[:, 1] = torch.randint(4, 7, (tokens,), generator=generator).int()
    routes[::5, 1] = -1
    routes[17, 0] = 0  # expert 0 has one row; expert 7 has none
    return random_batch(seed, tokens, hidden=128, intermediate=192, experts=8, dtype=dtype, routes=routes)


@DTYPES
def test_p1_runs_repeat(ranks4: RankPool, seed: int, dtype: torch.dtype) -> None:
    batch, other = _batch(seed, dtype), _batch(seed + 1, dtype)
    run = Run(even_tokens(601, 4), {"minibatch_size": 128, "macrobatch_size": 256})
    first = execute(ranks4, batch, run)
    for _ in range(3):
        execute(ranks4, other, run)  # leaves other contents in the shared buffers
        assert_same_bits(execute(ranks4, batch, run), first)


@DTYPES
def test_p2_p3_ring_sizes_do_not_show(ranks4: RankPool, seed: int, dtype: torch.dtype) -> None:
    batch = _batch(seed, dtype)
    want = execute(ranks4, batch, Run((300, 301)))
    macrobatches = set()
    for config in CONFIGS:
        got = execute(ranks4, batch, Run((300, 301), config))
        macrobatches.update(got.macrobatches())
        assert_same_bits(got, want)
    assert 1 in macrobatches and max(macrobatches) >= 3, macrobatches


@DTYPES
def test_p2_p3_ep_size_does_not_show(ranks4: RankPool, seed: int, dtype: torch.dtype) -> None:
    batch = _batch(seed, dtype)
    want = execute(None, batch, Run((601,)))
    for tokens in [(601,), (601, 0), (100, 501), even_tokens(601, 4), (0, 0, 601, 0), (1, 256, 300, 44)]:
        for config in ({}, CONFIGS[0]):
            assert_same_bits(execute(ranks4, batch, Run(tokens, config)), want)


@DTYPES
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -3.0], ids=["nan", "inf", "number"])
def test_p2_other_tokens_do_not_show(ranks4: RankPool, seed: int, dtype: torch.dtype, poison: float) -> None:
    """Every other token's values replaced, in x, dy and router weights: the kept tokens' y, dx and d_router_weights stay."""
    batch = _batch(seed, dtype)
    kept = torch.arange(601) % 2 == 0
    changed = Batch(**{f.name: getattr(batch, f.name).clone() for f in dataclasses.fields(Batch)})
    for tensor in (changed.x, changed.dy, changed.router_weights):
        tensor[~kept] = poison
    run = Run((300, 301), CONFIGS[0])
    want, got = execute(ranks4, batch, run), execute(ranks4, changed, run)
    names = ("y", "dx", "d_router_weights")

    def only_kept(result: Result) -> Result:
        return dataclasses.replace(result, **{name: getattr(result, name)[kept] for name in names})

    assert_same_bits(only_kept(got), only_kept(want), names)
    assert not torch.equal(got.y[~kept], want.y[~kept])


@DTYPES
@pytest.mark.parametrize("every", [7, 300, 601])
def test_p2_neighbours_may_come_and_go(seed: int, dtype: torch.dtype, every: int) -> None:
    """A token keeps its bits when others lose their routes and it moves to another row, of another tile, or is alone in its expert.

    (A matrix product of 1 to 3 rows takes another path in the libraries than one of 128, and adds in another order.)
    """
    batch = _batch(seed, dtype)
    run = Run((601,))
    want = execute(None, batch, run)
    fewer = Batch(**{f.name: getattr(batch, f.name).clone() for f in dataclasses.fields(Batch)})
    kept = torch.arange(601) % every == every // 2
    fewer.topk_experts[~kept] = -1
    got = execute(None, fewer, run)
    for name in ("y", "dx", "d_router_weights"):
        assert torch.equal(getattr(got, name)[kept], getattr(want, name)[kept]), name
        assert bool((getattr(got, name)[~kept] == 0).all()), name


def _shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same values at an address that is a multiple of the element size only, as a parameter in a flat buffer may be."""
    flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return flat[1:].view(tensor.shape).copy_(tensor)


@DTYPES
def test_p1_threads_and_addresses_do_not_show(seed: int, dtype: torch.dtype) -> None:
    batch = _batch(seed, dtype)
    want = execute(None, batch, Run((601,)))
    moved = Batch(**{f.name: _shifted(getattr(batch, f.name)) for f in dataclasses.fields(Batch)})
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2 if threads == 1 else 1)
        other = torch.get_num_threads()
        assert_same_bits(execute(None, moved, Run((601,))), want)
        assert torch.get_num_threads() == other != threads
    finally:
        torch.set_num_threads(threads)
