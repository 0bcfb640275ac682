"""SonicMoE, the strongest open implementation for one Hopper GPU."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from mok_megatron.bench.problem import LayerProblem
from mok_megatron.bench.rows.base import Row, missing


def _without_autotuning() -> None:
    """Default kernels: autotuning one shape takes minutes, and the default came within a few per cent."""
    forward = importlib.import_module("sonicmoe.functional.forward")
    for name in ("gemm", "gemm_gated"):
        function = getattr(forward, name)
        if not isinstance(function, functools.partial):
            setattr(forward, name, functools.partial(function, tuned=False))


class SonicMoERow(Row):
    """``moe_general_routing_inputs`` with the same weights as views; metadata of the routes included, inference mode."""

    name = "sonicmoe"
    label = "SonicMoE"

    def __init__(self, problem: LayerProblem) -> None:
        super().__init__(problem)
        _without_autotuning()
        self._function: Any = importlib.import_module("sonicmoe.functional").moe_general_routing_inputs
        self._activation = importlib.import_module("sonicmoe.enums").ActivationType.SWIGLU
        tokens, topk = problem.topk_experts.shape
        # The library wants one entry a route, tokens ascending; a router of its own would write them so.
        self._tokens = torch.arange(tokens, dtype=torch.int32, device=problem.x.device).repeat_interleave(topk)
        self._w1, self._w2 = problem.w13.permute(1, 2, 0), problem.w2.permute(1, 2, 0)

    @classmethod
    def unavailable(cls, problem: LayerProblem) -> str | None:
        if missing("sonicmoe"):
            return missing("sonicmoe")
        return None if problem.ranks.device.type == "cuda" and problem.ranks.ep_size == 1 else "needs one GPU: it has no expert parallelism"

    def forward(self) -> torch.Tensor:
        p = self.problem
        return self._function(
            p.x,
            p.router_weights.view(-1),
            self._tokens,
            p.topk_experts.view(-1),
            self._w1,
            None,
            self._w2,
            None,
            p.num_experts,
            torch.cuda.current_stream().cuda_stream,
            self._activation,
            True,  # inference: the pre-activations are not written
            True,  # gate rows first, not interleaved
        )[0]
