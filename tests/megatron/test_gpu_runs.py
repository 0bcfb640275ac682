"""What the tests of tests/gpu do with Megatron, here on the CPU with Megatron's own linears."""

from __future__ import annotations

from tests.distributed import run_ranks


def _compare(rank: int, seed: int) -> dict[int, dict[str, float]]:
    from tests.gpu import megatron_layers

    megatron_layers.start(rank, 2, "cpu", "")
    return {ep_size: megatron_layers.compare_with_stock("cpu", ep_size, seed) for ep_size in (1, 2)}


def test_no_farther_from_fp32_than_alltoall(seed: int) -> None:
    for found in run_ranks(_compare, 2, seed, timeout=200):
        print(found)
