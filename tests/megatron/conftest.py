"""Rank processes of these tests find Megatron imported; importing it anew in each takes seconds."""

from __future__ import annotations

from tests.distributed import preload

preload("mok_megatron.functional", "tests.megatron.helpers")
