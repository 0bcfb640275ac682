"""What the tests of tests/gpu do with Megatron, here on the CPU with Megatron's own linears."""

from __future__ import annotations

from typing import Any

from tests.distributed import run_ranks


def _layers(rank: int, seed: int) -> dict[int, dict[str, float]]:
    from tests.gpu import megatron_layers

    megatron_layers.start(rank, 2, "cpu", "")
    return {ep_size: megatron_layers.compare_with_stock("cpu", ep_size, seed) for ep_size in (1, 2)}


def test_no_farther_from_fp32_than_alltoall(seed: int) -> None:
    for found in run_ranks(_layers, 2, seed, timeout=200):
        print(found)


def _models(rank: int, seed: int) -> Any:
    from tests.gpu import megatron_gpt, megatron_layers

    megatron_layers.start(rank, 2, "cpu", "")
    return megatron_gpt.compare_all("cpu", 2, seed)


def test_losses_and_gradients_stay_within_the_floor_of_stock_runs(seed: int) -> None:
    for found in run_ranks(_models, 2, seed, timeout=300):
        print(found)
