"""The route schedule of a rank, and the context that a forward keeps for its backward."""

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class MoKSchedule:
    """Which row of which rank goes where, for one call's routes. Read-only; one schedule serves forward, recompute and backward.

    num_tokens: T of this rank.
    row_source_rank: int32 [capacity], rank that row comes from, -1 on padding.
    row_source_slot: int32 [capacity], token * K + slot there, -1 on padding.
    expert_rows: int32 [E_local], routes of each local expert, without padding.
    expert_row_offsets: int64 [E_local + 1], first row of each expert, multiples of 128.
    num_rows: int64 [1], R padded.
    topk_experts: int32 [T, K], this rank's own routes, -1 = none.
    """

    num_tokens: int
    row_source_rank: torch.Tensor
    row_source_slot: torch.Tensor
    expert_rows: torch.Tensor
    expert_row_offsets: torch.Tensor
    num_rows: torch.Tensor
    topk_experts: torch.Tensor


@dataclasses.dataclass(frozen=True)
class MoKContext:
    """What a forward keeps: of the first macrobatch the fetched rows and their gate and up projections.

    x_rows: [macrobatch_size, H]; gate_up: [macrobatch_size, 2I], gate columns first. Rows beyond R are undefined.
    """

    x_rows: torch.Tensor
    gate_up: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x_rows, self.gate_up

    @classmethod
    def from_tensors(cls, tensors: tuple[torch.Tensor, ...]) -> "MoKContext":
        return cls(*tensors)
