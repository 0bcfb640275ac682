"""The floor: only the two grouped GEMMs of the forward, on this rank's rows without padding."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mok_megatron.bench import oracle
from mok_megatron.bench.problem import LayerProblem
from mok_megatron.bench.rows.base import Row

_CHECKED_ROWS = 16


class BareRow(Row):
    """Both operands lie ready in the order of the experts; there is no activation, and what the first GEMM writes nobody reads."""

    name = "bare"
    label = "bare grouped GEMMs"

    def __init__(self, problem: LayerProblem) -> None:
        super().__init__(problem)
        counts = torch.tensor(problem.local_expert_rows(), device=problem.x.device)
        self._ends = counts.cumsum(0).to(torch.int32)
        rows = int(counts.sum())
        generator = torch.Generator(problem.x.device).manual_seed(problem.ranks.rank)
        self._x, self._h = (
            torch.randn(rows, width, generator=generator, device=problem.x.device).to(problem.x.dtype)
            for width in (problem.shape.hidden_size, problem.shape.intermediate_size)
        )

    def forward(self) -> torch.Tensor:
        return self._products()[1]

    def _products(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._x.shape[0] == 0:
            return self._x, self._x
        first = F.grouped_mm(self._x, self.problem.w13.transpose(1, 2), offs=self._ends)
        return first, F.grouped_mm(self._h, self.problem.w2.transpose(1, 2), offs=self._ends)

    def verify(self, reference: oracle.Reference) -> oracle.Verdict:
        """Both products on some rows; one rounding each."""
        products = self._products()
        count = self._x.shape[0]
        allowed = oracle.tolerance(self.problem, roundings=1)
        if count == 0:
            return oracle.Verdict(0.0, allowed)
        rows = torch.linspace(0, count - 1, min(count, _CHECKED_ROWS), device=self._x.device).long()
        owners = torch.arange(self.problem.shape.experts_per_gpu).repeat_interleave(torch.tensor(self.problem.local_expert_rows()))
        experts = owners[rows.cpu()].tolist()
        verdicts = []
        for operand, weights, product in zip((self._x, self._h), (self.problem.w13, self.problem.w2), products, strict=True):
            value = torch.stack([operand[row].double() @ weights[e].double().T for row, e in zip(rows.tolist(), experts, strict=True)])
            verdicts.append(oracle.compare(value, value.norm(dim=1), product, rows, allowed))
        return max(verdicts, key=lambda verdict: verdict.error)
