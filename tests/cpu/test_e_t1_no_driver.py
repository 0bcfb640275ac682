"""E-T1: without a driver, Transformer Engine, APEX or Megatron the package imports and the CPU executor runs; CUDA is never touched."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import importlib.abc, os, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("transformer_engine", "apex", "megatron", "deep_ep", "triton"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import mok_megatron
assert "mok_megatron.ops" not in sys.modules, "the bare import must not need the compiled library"
from mok_megatron import MoKConfig, functional
import torch
with open("/proc/self/maps") as maps:
    before = "libcuda.so" in maps.read()
w = functional.get_workspace(MoKConfig(), None, device="cpu", num_local_tokens=4, hidden_size=64, topk=1, num_local_experts=1,
                             intermediate_size=64, dtype=torch.float32)
s = functional.build_schedule(w, MoKConfig(), torch.zeros(4, 1, dtype=torch.int64))
y, _ = functional.forward(MoKConfig(), w, s, torch.ones(4, 64), torch.ones(4, 1), torch.ones(1, 128, 64), torch.ones(1, 64, 64))
assert y.shape == (4, 64) and float(y[0, 0]) > 0
assert not torch.cuda.is_initialized()
print("ran", before)
"""


def test_e_t1_imports_and_runs_without_gpu_packages() -> None:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, env=env)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "ran False", result.stdout
