"""Training of a small GPT on GPUs: distributed optimizer, overlapped reduction and gathering, microbatches, recomputation, pipeline stages."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tests.distributed import run_ranks
from tests.gpu.test_megatron_layer import pytestmark  # noqa: F401  - the same packages are needed


def _compare(rank: int, world_size: int, rendezvous: str, seed: int) -> dict[str, dict[str, float]]:
    # What torchrun's users set for Megatron; read when CUDA starts.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    from tests.gpu import megatron_gpt, megatron_layers

    megatron_layers.start(rank, world_size, "cuda", rendezvous)
    return megatron_gpt.compare_all("cuda", world_size, seed)


def test_losses_and_gradients_stay_within_the_floor_of_stock_runs(tmp_path: Path, seed: int) -> None:
    ranks = min(torch.cuda.device_count(), 2)
    for found in run_ranks(_compare, ranks, ranks, str(tmp_path / "nccl"), seed, timeout=200):
        print(found)
