"""Rank processes of these tests find Megatron imported; importing it anew in each takes seconds."""

from __future__ import annotations

import os

from tests.distributed import preload

# Megatron compiles small functions with inductor, which takes seconds each on a CPU. Read when torch._dynamo is imported.
os.environ["TORCH_COMPILE_DISABLE"] = "1"

preload("mok_megatron.functional", "tests.megatron.helpers")
