"""A-T6 on a GPU: more than 2^31 elements of rows. Only sampled rows have gradients, and only they are looked at with the oracle."""

from collections.abc import Iterator

import pytest
import torch

from mok_megatron.executors.cuda_backward import OVERWRITE_FLAG
from mok_megatron.schedule import MoKContext
from tests.gpu import harness
from tests.gpu.backward_runs import NAN
from tests.gpu.harness import Group
from tests.oracle import assert_within, moe_oracle

TOKENS, EXPERTS = 301_000, 2
NEEDED_BYTES = 80 << 30


@pytest.fixture
def free_bytes() -> Iterator[int]:
    """Of the GPU's memory, with nothing kept by the allocator; nor afterwards."""
    torch.cuda.empty_cache()
    yield torch.cuda.mem_get_info()[0]
    torch.cuda.empty_cache()


def _sample(routes: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Tokens of the first and last rows of each expert, the last tokens, and some from anywhere, in order."""
    parts = [torch.randint(TOKENS, (40,), generator=generator), torch.arange(TOKENS - 20, TOKENS)]
    for expert in range(EXPERTS):
        rows = (routes[:, 0] == expert).nonzero()[:, 0]
        parts += [rows[:20], rows[-20:]]
    return torch.cat(parts).unique()


@pytest.mark.parametrize(("hidden", "inner"), [(7168, 64), (64, 3648)], ids=["rows of H", "rows of 2I"])
def test_rows_beyond_31_bits(hidden: int, inner: int, free_bytes: int, seed: int) -> None:
    """One route a token: tokens, slots and rows all pass 2^31 elements of the wider of x and gate and up."""
    if free_bytes < NEEDED_BYTES:
        pytest.skip(f"needs {NEEDED_BYTES >> 30} GiB of GPU memory, {free_bytes >> 30} are free")
    assert max(hidden, 2 * inner) * (TOKENS - 1000) > 2**31
    g = torch.Generator().manual_seed(seed)
    routes = torch.randint(EXPERTS, (TOKENS, 1), generator=g).int()
    sample = _sample(routes, g)
    p = torch.rand(TOKENS, 1, generator=g) + 0.5
    w13 = (torch.randn(EXPERTS, 2 * inner, hidden, generator=g) * hidden**-0.5).bfloat16()
    w2 = (torch.randn(EXPERTS, hidden, inner, generator=g) * inner**-0.5).bfloat16()
    sample_dy = torch.randn(len(sample), hidden, generator=g).bfloat16()

    group = Group(1, TOKENS, 1, hidden, inner, EXPERTS)
    device, executor = group.devices[0], group.executors[0]
    assert group.macrobatch >= TOKENS
    x = torch.empty(TOKENS, hidden, dtype=torch.bfloat16, device=device).normal_(generator=torch.Generator(device).manual_seed(seed))
    dy = torch.zeros_like(x)
    dy[sample.to(device)] = sample_dy.to(device)
    weights = [p.to(device), w13.to(device), w2.to(device)]
    (schedule,) = group.schedules([routes])
    context = MoKContext(
        torch.empty(group.macrobatch, hidden, dtype=torch.bfloat16, device=device),
        torch.empty(group.macrobatch, 2 * inner, dtype=torch.bfloat16, device=device),
    )
    grads = [torch.full(w.shape, NAN, device=device) for w in (w13, w2)]
    group.synchronize_devices()
    limits = {"timeout_seconds": harness.TIMEOUT_SECONDS}
    y = executor.forward(schedule, x, *weights, context=context, **limits)
    words = [[matrix.data_ptr() | OVERWRITE_FLAG for matrix in grad] for grad in grads]
    dx, d_router_weights = executor.backward(schedule, context, dy, x, *weights, *words, **limits)
    torch.cuda.synchronize()
    assert not any(fault[0] for fault in group.faults())

    at = sample.to(device)
    want = moe_oracle(x[at].cpu(), p[sample], routes[sample], w13, w2, sample_dy, dtype=torch.bfloat16, grad_dtype=torch.float32)
    assert_within("y", y[at].cpu(), want.y)
    assert_within("dx", dx[at].cpu(), want.dx)
    assert_within("d_router_weights", d_router_weights[at].cpu(), want.d_router_weights)
    # All other rows add exact zeros.
    assert_within("dw13", grads[0].cpu(), want.dw13)
    assert_within("dw2", grads[1].cpu(), want.dw2)
    dx[at] = 0
    assert not dx.any()
    assert torch.isfinite(y).all()
    assert (y != 0).any(dim=1).all()
