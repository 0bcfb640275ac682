"""SonicMoE, the strongest open implementation for one Hopper GPU."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from mok_megatron.bench.gradients import Gradients
from mok_megatron.bench.problem import LayerProblem
from mok_megatron.bench.rows.base import AutogradRow, missing

_TUNED = {"forward": ("gemm", "gemm_gated"), "backward": ("gemm", "gemm_dgated")}


def _without_autotuning() -> None:
    """Default kernels: autotuning one shape takes minutes, and the default came within a few per cent."""
    for pass_name, functions in _TUNED.items():
        module = importlib.import_module(f"sonicmoe.functional.{pass_name}")
        for name in functions:
            function = getattr(module, name)
            if not isinstance(function, functools.partial):
                setattr(module, name, functools.partial(function, tuned=False))


class SonicMoERow(AutogradRow):
    """``moe_general_routing_inputs`` with the same weights as views; metadata of the routes included; bf16 weight gradients.

    A forward without a backward runs in its inference mode. The first call of a shape compiles its kernels, which takes a minute or two; that
    happens when the row is checked, before anything is timed.
    """

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

    @classmethod
    def unavailable(cls, problem: LayerProblem) -> str | None:
        if missing("sonicmoe"):
            return missing("sonicmoe")
        return None if problem.ranks.device.type == "cuda" and problem.ranks.ep_size == 1 else "needs one GPU: it has no expert parallelism"

    def leaves(self) -> tuple[torch.Tensor, ...]:
        p = self.problem
        return p.x, p.router_weights.view(-1), p.w13.permute(1, 2, 0), p.w2.permute(1, 2, 0)

    def layer(self, x: torch.Tensor, p: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, *, keep: bool) -> torch.Tensor:
        return self._function(
            x,
            p,
            self._tokens,
            self.problem.topk_experts.view(-1),
            w13,
            None,
            w2,
            None,
            self.problem.num_experts,
            torch.cuda.current_stream().cuda_stream,
            self._activation,
            not keep,  # inference: the pre-activations are not written
            True,  # gate rows first, not interleaved
        )[0]

    def gradients(self, returned: tuple[torch.Tensor, ...]) -> Gradients:
        dx, d_p, dw13, dw2 = returned
        return Gradients(dx, d_p.view_as(self.problem.router_weights), dw13.permute(2, 0, 1), dw2.permute(2, 0, 1))
