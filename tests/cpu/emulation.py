"""A slow, single-process executor with the roundings of the design, into which mistakes can be planted.

It stands in for a real executor in the tests of the oracle's bound: without a mistake it must stay inside, with one it must not.
"""

from __future__ import annotations

import torch

MISTAKES = (
    "gate_up_swapped",
    "route_dropped",
    "p_applied_twice",
    "p_missing",
    "last_k_column_missing_in_gemm1",
    "last_k_column_missing_in_gemm2",
    "row_off_by_one_in_one_expert",
    "silu_slope_without_sigmoid_term",
    "dx_without_up_part",
    "d_p_divided_by_p",
    "wgrad_misses_last_row",
    "p_missing_in_dgate",
    "slots_summed_twice",
)


def emulate(
    x: torch.Tensor,
    router_weights: torch.Tensor,
    topk_experts: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    dy: torch.Tensor,
    mistake: str | None = None,
) -> dict[str, torch.Tensor]:
    """Return y, dx, d_router_weights, dw13, dw2 for the global batch, computed in fp32 with one planted mistake or none."""
    dtype = x.dtype
    tokens, topk = topk_experts.shape
    inter = w13.shape[1] // 2
    rows = torch.zeros(tokens, topk, x.shape[1])
    dx_rows = torch.zeros_like(rows)
    d_p = torch.zeros(tokens, topk)
    dw13, dw2 = torch.zeros(w13.shape), torch.zeros(w2.shape)

    def rnd(t: torch.Tensor) -> torch.Tensor:
        return t.to(dtype).float()

    busiest = int(torch.bincount(topk_experts[topk_experts >= 0], minlength=w13.shape[0]).argmax())
    for expert in range(w13.shape[0]):
        token, slot = torch.nonzero(topk_experts == expert, as_tuple=True)
        if mistake == "route_dropped" and expert == busiest:
            token, slot = token[:-1], slot[:-1]
        if token.numel() == 0:
            continue
        xr, p, dyr = x[token].float(), router_weights[token, slot][:, None].float(), dy[token].float()
        if mistake == "row_off_by_one_in_one_expert" and expert == busiest:
            xr = xr.roll(1, 0)
        a13, a2 = w13[expert].float(), w2[expert].float()
        width = -1 if mistake == "last_k_column_missing_in_gemm1" else None
        gate_up = rnd(xr[:, :width] @ a13[:, :width].T)
        gate, up = gate_up[:, :inter], gate_up[:, inter:]
        if mistake == "gate_up_swapped":
            gate, up = up, gate
        sigma = torch.sigmoid(gate)
        act = gate * sigma
        weight = {"p_applied_twice": p * p, "p_missing": torch.ones_like(p)}.get(mistake or "", p)
        h = rnd(act * up * weight)
        width = -1 if mistake == "last_k_column_missing_in_gemm2" else None
        rows[token, slot] = rnd(h[:, :width] @ a2[:, :width].T)
        a = dyr @ a2
        dots = (a * act * up).sum(1)
        d_p[token, slot] = dots / p[:, 0] if mistake == "d_p_divided_by_p" else dots
        slope = sigma * (1 + gate * (1 - sigma)) if mistake != "silu_slope_without_sigmoid_term" else sigma
        d_gate = rnd(a * (p if mistake != "p_missing_in_dgate" else torch.ones_like(p)) * up * slope)
        d_up = rnd(a * p * act)
        d13 = torch.cat([d_gate, d_up], 1)
        dx_rows[token, slot] = rnd(d_gate @ a13[:inter] if mistake == "dx_without_up_part" else d13 @ a13)
        last = -1 if mistake == "wgrad_misses_last_row" else None
        dw2[expert] = dyr[:last].T @ h[:last]
        dw13[expert] = d13[:last].T @ xr[:last]
    factor = 2.0 if mistake == "slots_summed_twice" else 1.0
    return {
        "y": (rows.sum(1) * factor).to(dtype),
        "dx": dx_rows.sum(1).to(dtype),
        "d_router_weights": d_p,
        "dw13": dw13.to(dtype),
        "dw2": dw2.to(dtype),
    }
