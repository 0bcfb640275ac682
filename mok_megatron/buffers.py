"""Sizes and memory of a workspace: symmetric buffers that the ranks of a group share, and one rank's rings."""

import dataclasses
import math

import torch

from mok_megatron.config import BLOCK_ROWS, CHANNEL_MULTIPLE, MAX_EP_SIZE, MAX_LOCAL_EXPERTS, MAX_TOPK
from mok_megatron.errors import MoKArgumentError
from mok_megatron.ops import tile_sizes
from mok_megatron.protocol import ROW_WORDS, STATUS_RECORDS, TEXT_BYTES, FlagMemory

# The ring's margin over num_local_tokens * K, as a fraction.
_RING_MARGIN = 0.25
_ALIGNMENT = 256
_MINIBATCH_STEP = 16 * BLOCK_ROWS


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class WorkspaceShape:
    """Everything that the sizes of a workspace depend on; equal on all ranks of the group.

    Raises:
        MoKArgumentError: a size breaks its rule.
    """

    ep_size: int
    num_local_tokens: int
    hidden_size: int
    topk: int
    num_local_experts: int
    intermediate_size: int
    dtype: torch.dtype
    minibatch_size: int | None = None
    macrobatch_size: int | None = None
    schedule_capacity_multiplier: float = 1.0

    def __post_init__(self) -> None:
        sizes = {
            "num_local_tokens": (self.num_local_tokens, 0, None, 1),
            "hidden_size": (self.hidden_size, CHANNEL_MULTIPLE, None, CHANNEL_MULTIPLE),
            "topk": (self.topk, 1, MAX_TOPK, 1),
            "num_local_experts": (self.num_local_experts, 1, MAX_LOCAL_EXPERTS, 1),
            "intermediate_size": (self.intermediate_size, CHANNEL_MULTIPLE, None, CHANNEL_MULTIPLE),
            "expert-parallel size": (self.ep_size, 1, MAX_EP_SIZE, 1),
        }
        for name, (value, low, high, multiple) in sizes.items():
            if isinstance(value, bool) or not isinstance(value, int):
                raise MoKArgumentError(f"{name}={value!r}: must be an integer")
            if value < low or (high is not None and value > high) or value % multiple:
                bound = f"at least {low}" if high is None else f"in [{low}, {high}]"
                rule = f"must be {bound}" + (f" and a multiple of {multiple}" if multiple > 1 else "")
                raise MoKArgumentError(f"{name}={value}: {rule}")
        if self.dtype not in (torch.bfloat16, torch.float32):
            raise MoKArgumentError(f"dtype={self.dtype}: must be torch.bfloat16 or torch.float32")
        if self.num_local_tokens * self.topk > 2**31 - 1:
            raise MoKArgumentError(
                f"num_local_tokens={self.num_local_tokens}: times topk={self.topk} must be below 2^31 (row slots are 32-bit)"
            )
        if self.topk > self.num_local_experts * self.ep_size:
            raise MoKArgumentError(f"topk={self.topk}: must not exceed the number of experts, {self.num_local_experts * self.ep_size}")

    @property
    def num_experts(self) -> int:
        return self.num_local_experts * self.ep_size

    @property
    def capacity_rows(self) -> int:
        """Rows of the schedule's tables: the share of all routes that is allowed, and the padding of every expert on top."""
        routes = math.ceil(self.schedule_capacity_multiplier * self.ep_size * self.num_local_tokens * self.topk)
        return _round_up(routes, BLOCK_ROWS) + self.num_local_experts * BLOCK_ROWS

    def ring(self, num_sms: int) -> tuple[int, int]:
        """Rows of a minibatch and of the ring, (minibatch_size, macrobatch_size).

        The second GEMM trails the first by three minibatches, which must hold two waves of 128 x 256 tiles of the narrower GEMM: rows >=
        2 * SMs * 128 * 256 / min(2I, H). A minibatch is a third of them, up to the next multiple of 2048: in smaller ones fewer tiles that
        share weights run at the same time.
        """
        narrow = min(2 * self.intermediate_size, self.hidden_size)
        waves = math.ceil(2 * num_sms * 128 * 256 / narrow)
        minibatch = self.minibatch_size or _round_up(math.ceil(waves / tile_sizes().lag), _MINIBATCH_STEP)
        if self.macrobatch_size is not None:
            if self.minibatch_size is None:
                minibatch = max(
                    rows for rows in range(BLOCK_ROWS, min(minibatch, self.macrobatch_size) + 1, BLOCK_ROWS) if self.macrobatch_size % rows == 0
                )
            return minibatch, self.macrobatch_size
        routes = math.ceil(self.num_local_tokens * self.topk * (1 + _RING_MARGIN))
        rows = _round_up(routes, BLOCK_ROWS) + self.num_local_experts * BLOCK_ROWS
        rows = min(rows, self.capacity_rows)
        if self.minibatch_size is None:
            minibatch = min(minibatch, rows)
        return minibatch, _round_up(rows, minibatch)


@dataclasses.dataclass
class SymmetricBuffers:
    """What a rank shares with its peers. They read all of it, and write combine, d_router_weights and flags.

    x, dy: [T_max, H]; router_weights: fp32 [T_max, K]; combine: [T_max * K, H], routed outputs or input gradients by slot;
    d_router_weights: fp32 [T_max * K]; topk_experts: int32 [2, T_max, K] and num_tokens: int64 [2], double-buffered by call parity because a
    slow peer may still read the last one.
    """

    x: torch.Tensor
    dy: torch.Tensor
    router_weights: torch.Tensor
    combine: torch.Tensor
    d_router_weights: torch.Tensor
    topk_experts: torch.Tensor
    num_tokens: torch.Tensor
    flags: FlagMemory

    @staticmethod
    def layout(shape: WorkspaceShape) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        tokens, topk = shape.num_local_tokens, shape.topk
        return {
            "words": ((shape.ep_size, ROW_WORDS), torch.int64),
            "num_tokens": ((2,), torch.int64),
            "texts": ((shape.ep_size, STATUS_RECORDS, TEXT_BYTES), torch.uint8),
            "topk_experts": ((2, tokens, topk), torch.int32),
            "x": ((tokens, shape.hidden_size), shape.dtype),
            "dy": ((tokens, shape.hidden_size), shape.dtype),
            "router_weights": ((tokens, topk), torch.float32),
            "combine": ((tokens * topk, shape.hidden_size), shape.dtype),
            "d_router_weights": ((tokens * topk,), torch.float32),
        }

    @classmethod
    def num_bytes(cls, shape: WorkspaceShape) -> int:
        return sum(_round_up(math.prod(sizes) * dtype.itemsize, _ALIGNMENT) for sizes, dtype in cls.layout(shape).values())

    @classmethod
    def from_memory(cls, shape: WorkspaceShape, memory: torch.Tensor) -> "SymmetricBuffers":
        """Views of uint8 memory of num_bytes(shape) bytes."""
        views, at = {}, 0
        for name, (sizes, dtype) in cls.layout(shape).items():
            size = math.prod(sizes) * dtype.itemsize
            views[name] = memory[at : at + size].view(dtype).view(sizes)
            at += _round_up(size, _ALIGNMENT)
        flags = FlagMemory(views.pop("words"), views.pop("texts"))
        return cls(flags=flags, **views)


@dataclasses.dataclass
class Rings:
    """Per-rank scratch rows that macrobatches take turns in, [macrobatch_size, ...].

    x, gate_up: forward without context, and the backward's replay; activation: h = silu(gate) * up * p; dy; d_gate_up;
    router_weights: fp32 [rows]; d_router_weights: fp32 [rows, tiles], partial sums per column tile of I; wgrad13, wgrad2: fp32 weight-sized
    sums of the expert that straddles two macrobatches.
    """

    x: torch.Tensor
    gate_up: torch.Tensor
    activation: torch.Tensor
    dy: torch.Tensor
    d_gate_up: torch.Tensor
    router_weights: torch.Tensor
    d_router_weights: torch.Tensor
    wgrad13: torch.Tensor
    wgrad2: torch.Tensor

    @classmethod
    def allocate(cls, shape: WorkspaceShape, macrobatch_size: int, device: torch.device) -> "Rings":
        rows, hidden, inner = macrobatch_size, shape.hidden_size, shape.intermediate_size
        straddles = shape.capacity_rows > rows

        def rows_of(width: int) -> torch.Tensor:
            return torch.empty(rows, width, dtype=shape.dtype, device=device)

        def fp32(*sizes: int) -> torch.Tensor:
            return torch.empty(*sizes, dtype=torch.float32, device=device)

        return cls(
            x=rows_of(hidden),
            gate_up=rows_of(2 * inner),
            activation=rows_of(inner),
            dy=rows_of(hidden),
            d_gate_up=rows_of(2 * inner),
            router_weights=fp32(rows),
            d_router_weights=fp32(rows, -(-inner // tile_sizes().activation_grad_cols)),
            wgrad13=fp32(2 * inner, hidden) if straddles else fp32(0),
            wgrad2=fp32(hidden, inner) if straddles else fp32(0),
        )
