"""Operators under tracing: the fake implementations promise what the real ones return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mok_megatron import ops

CALLS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "find_route_fault": ("find_route_fault", (torch.zeros(3, 1, dtype=torch.int32), 4)),
    "route_schedule": (
        "route_schedule",
        (torch.zeros(2, 5, 2, dtype=torch.int32), torch.tensor([5, 3]), 1, 3, 512),
    ),
    "tile_sizes": ("tile_sizes", (torch.empty(0),)),
    "row_offset": ("row_offset", (7, 64, torch.empty(0))),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_fake_results_have_the_real_shapes_and_dtypes(name: str) -> None:
    operator, arguments = CALLS[name]
    function = getattr(torch.ops.mok_megatron, operator)
    real = function(*arguments)
    with FakeTensorMode() as mode:
        fake = function(*[mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments])
    for a, b in zip(*[r if isinstance(r, tuple) else (r,) for r in (real, fake)], strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, (a, b)


def test_flags_are_stored_and_loaded() -> None:
    flags = torch.zeros(4, dtype=torch.int64)
    ops.store_flag(flags, 2, 2**40 + 1)
    assert ops.load_flag(flags, 2) == 2**40 + 1 and flags.tolist() == [0, 0, 2**40 + 1, 0]
    for index in (-1, 4):
        with pytest.raises(RuntimeError, match="flag"):
            ops.store_flag(flags, index, 1)
        with pytest.raises(RuntimeError, match="flag"):
            ops.load_flag(flags, index)


def test_block_is_128_rows() -> None:
    tiles = ops.tile_sizes()
    assert tiles.block_rows == 128 and tiles.block_rows % tiles.dispatch_rows == 0
