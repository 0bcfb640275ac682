"""The floor: only the grouped GEMMs of the layer, on this rank's rows without padding; bf16 weight gradients."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from mok_megatron.bench import gradients, oracle
from mok_megatron.bench.gradients import GradientReference
from mok_megatron.bench.phases import BACKWARD, PHASES
from mok_megatron.bench.problem import LayerProblem
from mok_megatron.bench.rows.base import Row

_CHECKED_ROWS = 16


class BareRow(Row):
    """All operands lie ready in the order of the experts; there is no activation, and what a GEMM writes nobody reads.

    Forward: two products. Backward: the gradients of both inputs and of both weights, four products. Together: six.
    """

    name = "bare"
    label = "bare grouped GEMMs"
    phases = PHASES

    def __init__(self, problem: LayerProblem) -> None:
        super().__init__(problem)
        counts = torch.tensor(problem.local_expert_rows(), device=problem.x.device)
        self._ends = counts.cumsum(0).to(torch.int32)
        self._rows = int(counts.sum())
        hidden, inner = problem.shape.hidden_size, problem.shape.intermediate_size
        self._x, self._h = self._normal(hidden, 0), self._normal(inner, 1)

    def forward(self) -> torch.Tensor:
        return self._forward_products()[1]

    def _normal(self, width: int, seed: int) -> torch.Tensor:
        generator = torch.Generator(self.problem.x.device).manual_seed(4 * self.problem.ranks.rank + seed)
        return torch.randn(self._rows, width, generator=generator, device=self.problem.x.device).to(self.problem.x.dtype)

    @functools.cached_property
    def _backward_operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        """dy and the gradient of gate and up, the operands that only a backward has."""
        return self._normal(self.problem.shape.hidden_size, 2), self._normal(2 * self.problem.shape.intermediate_size, 3)

    def begin(self) -> None:
        """There is no context: the operands are made once."""

    def backward(self) -> tuple[torch.Tensor, ...]:
        if self._rows == 0:
            return (self._h, self._x, torch.zeros_like(self.problem.w2), torch.zeros_like(self.problem.w13))
        dy, d_gate_up = self._backward_operands
        dh = F.grouped_mm(dy, self.problem.w2, offs=self._ends)
        dx = F.grouped_mm(d_gate_up, self.problem.w13, offs=self._ends)
        dw2 = F.grouped_mm(dy.t(), self._h, offs=self._ends)
        return dh, dx, dw2, F.grouped_mm(d_gate_up.t(), self._x, offs=self._ends)

    def forward_backward(self) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        return self.forward(), self.backward()

    def _forward_products(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._rows == 0:
            return self._x, self._x
        first = F.grouped_mm(self._x, self.problem.w13.transpose(1, 2), offs=self._ends)
        return first, F.grouped_mm(self._h, self.problem.w2.transpose(1, 2), offs=self._ends)

    def verify(self, reference: oracle.Reference) -> oracle.Verdict:
        """Both products on some rows; one rounding each."""
        first, second = self._forward_products()
        return self._judge_rows({"w13": (self._x, self.problem.w13.mT, first), "w2": (self._h, self.problem.w2.mT, second)})

    def verify_gradients(self, phase: str, reference: GradientReference) -> oracle.Verdict:
        """All four products on a sample, with the forward's two where they belong to the phase; one rounding each."""
        returned = self.call(phase)()
        dh, dx, dw2, dw13 = returned if phase == BACKWARD else returned[1]
        dy, d_gate_up = self._backward_operands
        verdicts = {} if phase == BACKWARD else {"forward": self.verify(reference.forward)}
        verdicts["dgrad"] = self._judge_rows({"w2": (dy, self.problem.w2, dh), "w13": (d_gate_up, self.problem.w13, dx)})
        ends, channels = self._ends.tolist(), reference.sample.channels
        got13, got2 = reference.sample.read(dw13, dw2)
        wanted13, wanted2 = [], []
        for expert in reference.sample.experts:
            mine = slice(ends[expert - 1] if expert else 0, ends[expert])
            wanted13.append(self._x[mine][:, channels].double().T @ d_gate_up[mine].double())
            wanted2.append(dy[mine][:, channels].double().T @ self._h[mine].double())
        allowed = oracle.tolerance(self.problem, roundings=1) + 2.0**-24 * reference.rows
        for name, wanted, got in (("dw13", torch.cat(wanted13), got13), ("dw2", torch.cat(wanted2), got2)):
            every = torch.arange(len(wanted), device=got.device)
            verdicts[name] = oracle.compare(wanted, wanted.norm(dim=1), got, every, allowed)
        return gradients.worst(verdicts)

    def _judge_rows(self, products: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> oracle.Verdict:
        """products: by name operand [R, n], weights [E_local, n, m] and what came out [R, m]."""
        allowed = oracle.tolerance(self.problem, roundings=1)
        if self._rows == 0:
            return oracle.Verdict(0.0, allowed)
        rows = torch.linspace(0, self._rows - 1, min(self._rows, _CHECKED_ROWS), device=self._x.device).long()
        owners = torch.arange(self.problem.shape.experts_per_gpu).repeat_interleave(torch.tensor(self.problem.local_expert_rows()))
        experts = owners[rows.cpu()].tolist()
        verdicts = {}
        for name, (operand, weights, product) in products.items():
            value = torch.stack([operand[row].double() @ weights[e].double() for row, e in zip(rows.tolist(), experts, strict=True)])
            verdicts[name] = oracle.compare(value, value.norm(dim=1), product, rows, allowed)
        return gradients.worst(verdicts)
