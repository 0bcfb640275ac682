"""The route schedule of a rank, and the context that a forward keeps for its backward."""

import dataclasses
import functools
from collections.abc import Callable

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

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows of the tables, local experts and K: those of the workspace that made it."""
        return self.row_source_rank.shape[0], self.expert_rows.shape[0], self.topk_experts.shape[1]

    def addresses(self) -> tuple[int, ...]:
        """Of row_source_rank, row_source_slot, expert_rows, expert_row_offsets and topk_experts."""
        tables = (self.row_source_rank, self.row_source_slot, self.expert_rows, self.expert_row_offsets, self.topk_experts)
        return tuple(table.data_ptr() for table in tables)

    def split(self) -> tuple[tuple[torch.Tensor, ...], Callable[..., "MoKSchedule"]]:
        """The tensors that hold it, and what makes a schedule of such tensors, given one by one."""
        tensors = [getattr(self, field.name) for field in dataclasses.fields(self)[1:]]
        return tuple(tensors), functools.partial(type(self), self.num_tokens)


class ScheduleLayout:
    """Where the tables of a schedule lie in one memory, in 32-bit words: those of int64 first, on 8 bytes.

    Attributes: sizes (rows, local experts, K), words (all tables but topk_experts, which comes last and grows with T).
    """

    def __init__(self, capacity_rows: int, num_local_experts: int, topk: int) -> None:
        self.sizes = (capacity_rows, num_local_experts, topk)
        # A multiple of 4 words keeps the tables of rows on 16 bytes.
        self.row_source_rank = -(-2 * (num_local_experts + 2) // 4) * 4
        self.row_source_slot = self.row_source_rank + capacity_rows
        self.expert_rows = self.row_source_slot + capacity_rows
        self.words = self.expert_rows + num_local_experts
        self.num_rows = 2 * (num_local_experts + 1)

    def addresses(self, memory: int) -> tuple[int, int, int, int, int, int]:
        """Of row_source_rank, row_source_slot, expert_rows, expert_row_offsets, num_rows and topk_experts in a memory at this address."""
        return (
            memory + 4 * self.row_source_rank,
            memory + 4 * self.row_source_slot,
            memory + 4 * self.expert_rows,
            memory,
            memory + 4 * self.num_rows,
            memory + 4 * self.words,
        )


class PackedSchedule(MoKSchedule):
    """A schedule whose tables lie in one int32 memory; views of them are made when somebody asks: a call needs the addresses alone."""

    memory: torch.Tensor
    layout: ScheduleLayout

    def __init__(self, layout: ScheduleLayout, num_tokens: int, memory: torch.Tensor) -> None:
        # The class is frozen.
        self.__dict__.update(layout=layout, num_tokens=num_tokens, memory=memory)

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.layout.sizes

    def addresses(self) -> tuple[int, ...]:
        *tables, _, topk_experts = self.layout.addresses(self.memory.data_ptr())
        return *tables, topk_experts

    def split(self) -> tuple[tuple[torch.Tensor, ...], Callable[..., MoKSchedule]]:
        return (self.memory,), functools.partial(PackedSchedule, self.layout, self.num_tokens)

    @functools.cached_property
    def expert_row_offsets(self) -> torch.Tensor:
        return self.memory[: self.layout.num_rows].view(torch.int64)

    @functools.cached_property
    def num_rows(self) -> torch.Tensor:
        return self.memory[self.layout.num_rows : self.layout.num_rows + 2].view(torch.int64)

    @functools.cached_property
    def row_source_rank(self) -> torch.Tensor:
        return self.memory[self.layout.row_source_rank : self.layout.row_source_slot]

    @functools.cached_property
    def row_source_slot(self) -> torch.Tensor:
        return self.memory[self.layout.row_source_slot : self.layout.expert_rows]

    @functools.cached_property
    def expert_rows(self) -> torch.Tensor:
        return self.memory[self.layout.expert_rows : self.layout.words]

    @functools.cached_property
    def topk_experts(self) -> torch.Tensor:
        return self.memory[self.layout.words :].view(self.num_tokens, self.sizes[2])


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
