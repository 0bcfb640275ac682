"""Megatron's MoE layer on GPUs, with Transformer Engine: MoK against AllToAll."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.distributed import run_ranks

_missing = [name for name in ("megatron", "transformer_engine") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(_missing), reason=f"needs {' and '.join(_missing)}, not installed here")


def _compare(rank: int, world_size: int, rendezvous: str, seed: int) -> dict[int, dict[str, float]]:
    from tests.gpu import megatron_layers

    megatron_layers.start(rank, world_size, "cuda", rendezvous)
    return {ep_size: megatron_layers.compare_with_stock("cuda", ep_size, seed) for ep_size in range(1, world_size + 1)}


def test_no_farther_from_fp32_than_alltoall(tmp_path: Path, seed: int) -> None:
    """EP 1, and EP 2 where there are two GPUs."""
    ranks = min(torch.cuda.device_count(), 2)
    for found in run_ranks(_compare, ranks, ranks, str(tmp_path / "nccl"), seed, timeout=150):
        print(found)
