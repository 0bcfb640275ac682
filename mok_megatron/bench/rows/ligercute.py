"""LigerCute's fused expert-parallel MoE."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from mok_megatron.bench import oracle
from mok_megatron.bench.problem import LayerProblem
from mok_megatron.bench.rows.base import Row, missing

_started = False


class LigerCuteRow(Row):
    """``moe_fused_fwd_bf16`` over NVSHMEM, gate and up as views of one weight, as its path without gradients takes them."""

    name = "ligercute"
    label = "LigerCute"
    wire = "route"
    roundings = oracle.ROUNDINGS + 1  # it takes router weights in bf16

    def __init__(self, problem: LayerProblem) -> None:
        global _started
        super().__init__(problem)
        self._ffi: Any = importlib.import_module("liger_cute_kernels.tvm_ffi")
        nvshmem = importlib.import_module("liger_cute_kernels.nvshmem")
        if not _started:
            nvshmem.init_from_pg(problem.ranks.group)
            _started = True
        self._ffi.moe_configure_symmetric(
            max_tokens=problem.max_tokens,
            hidden_dim=problem.shape.hidden_size,
            max_num_experts=problem.num_experts,
            max_top_k=problem.shape.topk,
            num_pes=problem.ranks.ep_size,
            num_hosts=1,
            gpus_per_host=problem.ranks.ep_size,
        )
        self._team = nvshmem.resolve_team(problem.ranks.group)
        inner = problem.shape.intermediate_size
        self._gate, self._up = problem.w13[:, :inner], problem.w13[:, inner:]
        self._weights = problem.router_weights.to(torch.bfloat16)

    @classmethod
    def unavailable(cls, problem: LayerProblem) -> str | None:
        if missing("liger_cute_kernels"):
            return missing("liger_cute_kernels")
        return None if problem.ranks.device.type == "cuda" and problem.ranks.ep_size > 1 else "needs GPUs and EP > 1"

    def forward(self) -> torch.Tensor:
        p = self.problem
        arguments = (p.x, p.topk_experts, self._weights, self._gate, self._up, p.w2, p.num_experts, p.shape.topk, self._team)
        y = self._ffi.moe_fused_fwd_bf16(*arguments)[0]
        self._ffi.moe_pop_fwd()  # give back what was kept for a backward
        return y
