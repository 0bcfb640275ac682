"""Runs Megatron-LM's own test of its MoE layer's dispatchers with MoK in their place.

    torchrun --nproc-per-node N scripts/megatron_discrepancy.py CHECKOUT [pytest arguments]

CHECKOUT: Megatron-LM (tag core_v0.19.0), read and not changed. The test builds its layers with Megatron's defaults, which MoK has no kernels
for: experts with GELU, and in one of its cases FP32. So its TransformerConfig gets SwiGLU, and the FP32 case runs in BF16; the rest is the
test's own. Run are the cases of N ranks without expert tensor parallelism: EP 1, and EP N.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from pathlib import Path

import pytest
import torch

TEST = "tests.unit_tests.transformer.moe.test_moe_layer_discrepancy"


def main() -> int:
    checkout, *arguments = sys.argv[1:] or [""]
    if not (Path(checkout) / f"{TEST.replace('.', '/')}.py").is_file():
        raise SystemExit(f"{checkout!r} is no checkout of Megatron-LM, it has no {TEST.replace('.', '/')}.py\n\n{__doc__}")
    if torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        raise SystemExit(f"needs a GPU a process, {torch.cuda.device_count()} found")
    sys.path[0] = str(Path(checkout).resolve())
    from mok_megatron.megatron import apply_mok_to_megatron
    from mok_megatron.megatron.layer import MoKMoELayer

    apply_mok_to_megatron(backend="mok")
    test = importlib.import_module(TEST)
    test.TransformerConfig = functools.partial(test.TransformerConfig, gated_linear_unit=True, activation_func=torch.nn.functional.silu)
    test.TransformerLayer.float = test.TransformerLayer.bfloat16
    to_fp32 = torch.Tensor.float

    def to_float(tensor: torch.Tensor) -> torch.Tensor:
        # The test's input, and nothing that Megatron or MoK make FP32 on purpose.
        is_input = tensor.shape == (1, 4096, 4096) and tensor.dtype == torch.float32
        return tensor.bfloat16() if is_input else to_fp32(tensor)

    torch.Tensor.float = to_float
    calls = []
    compute = MoKMoELayer.routed_experts_compute

    def counted(self: MoKMoELayer, *args: torch.Tensor) -> tuple[torch.Tensor, None]:
        calls.append(type(self).__name__)
        return compute(self, *args)

    MoKMoELayer.routed_experts_compute = counted
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    sizes = " or ".join(f"1-{ep_size}-" for ep_size in sorted({1, ranks}))
    file = str(Path(test.__file__))
    code = pytest.main(
        [file, "--noconftest", "-c", os.devnull, "--rootdir", sys.path[0], "-p", "no:cacheprovider", "-q", "-k", sizes, *arguments]
    )
    print(f"{len(calls)} calls of MoK layers", flush=True)
    return int(code) if calls else 1


if __name__ == "__main__":
    sys.exit(main())
