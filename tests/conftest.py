"""Fixtures of the whole test suite: pools of ranks and a fresh seed for each test."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import pytest

from tests.distributed import RankPool


def _pool(world_size: int) -> Iterator[RankPool]:
    pool = RankPool(world_size)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ranks2() -> Iterator[RankPool]:
    """Two ranks, kept for the session."""
    yield from _pool(2)


@pytest.fixture(scope="session")
def ranks4() -> Iterator[RankPool]:
    """Four ranks, kept for the session; ``ranks=`` of its calls picks the first 1 to 4 of them."""
    yield from _pool(4)


@pytest.fixture(scope="session")
def ranks8() -> Iterator[RankPool]:
    """Eight ranks, kept for the session."""
    yield from _pool(8)


@pytest.fixture
def seed() -> int:
    """A fresh seed, printed (pytest shows it when the test fails); ``MOK_TEST_SEED`` fixes it."""
    value = int(os.environ.get("MOK_TEST_SEED") or secrets.randbelow(2**31))
    print(f"MOK_TEST_SEED={value}")
    return value
