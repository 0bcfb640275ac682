"""What the CUDA executor's backward and recompute need beyond the forward: rings, tables, and the form of a gradient's address."""

import ctypes
from collections.abc import Sequence

import torch

from mok_megatron.config import BLOCK_ROWS
from mok_megatron.errors import MoKArgumentError
from mok_megatron.executors.cpu import TILES, WeightGradTarget

_TENSOR_MAP_BYTES = 128
ALIGNMENT = 16
# In the lowest bits of a gradient's address.
OVERWRITE_FLAG, BF16_FLAG = 1, 2

BACKWARD_FIELDS = (
    "rank",
    "ep_size",
    "num_tokens",
    "topk",
    "hidden",
    "intermediate",
    "num_local_experts",
    "minibatch_blocks",
    "macrobatch_blocks",
    "capacity_blocks",
    "sm_reserve",
    "timeout_nanoseconds",
    "row_source_rank",
    "row_source_slot",
    "expert_rows",
    "expert_row_offsets",
    "topk_experts",
    "x",
    "dy",
    "router_weights",
    "dx",
    "d_router_weights",
    "x_rows",
    "gate_up",
    "ring_x",
    "ring_dy",
    "ring_gate_up",
    "ring_activation",
    "ring_d_gate_up",
    "ring_weights",
    "ring_partials",
    "scratch",
    "weight_maps",
    "counters",
    "records",
    "state",
    "fault",
)


def matrix_addresses(matrices: torch.Tensor | Sequence[torch.Tensor]) -> Sequence[int]:
    """Where the E_local matrices of one tensor or of a list begin now."""
    if isinstance(matrices, torch.Tensor):
        # A tensor of one expert may have any stride.
        first, step = matrices.data_ptr(), max(matrices.stride(0) * matrices.element_size(), 1)
        return range(first, first + matrices.shape[0] * step, step)
    return list(map(torch.Tensor.data_ptr, matrices))


def grad_words(name: str, targets: Sequence[WeightGradTarget]) -> list[int]:
    """Addresses of E_local gradients, fp32 or bf16, with their flags in the lowest bits; 0 where none is wanted.

    Raises:
        MoKArgumentError: a gradient is not contiguous or does not lie on 16 bytes.
    """
    words = []
    for index, target in enumerate(targets):
        tensor = target.tensor
        if tensor is None:
            words.append(0)
            continue
        if not tensor.is_contiguous():
            raise MoKArgumentError(f"{name}[{index}]: strides {tensor.stride()} must be those of a contiguous matrix on a GPU")
        address = tensor.data_ptr()
        if address % ALIGNMENT:
            raise MoKArgumentError(f"{name}[{index}]: address {address:#x} must be a multiple of {ALIGNMENT}")
        words.append(address | (OVERWRITE_FLAG if target.overwrite else 0) | (BF16_FLAG if tensor.dtype == torch.bfloat16 else 0))
    return words


class BackwardMemory:
    """Device memory that only the backward and the recompute use. Made at the first of them.

    dy: bf16 [rows, H]; gate_up, d_gate_up: bf16 [rows, 2I]; partials: fp32 [rows, ceil(I / 256)]; scratch: fp32 sums of the expert that
    straddles two macrobatches; records: the table of tasks; weight_maps: tensor maps of all weights and of their fp32 gradients. scratch and
    gate_up, which only a replay writes, are empty where one macrobatch holds all rows.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        device: torch.device,
        *,
        rows: int,
        capacity_rows: int,
        num_local_tokens: int,
        hidden: int,
        inner: int,
        experts: int,
    ) -> None:
        straddles = capacity_rows > rows

        def empty(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(*sizes, dtype=dtype, device=device)

        self.dy = empty(rows, hidden)
        self.gate_up = empty(rows if straddles else 0, 2 * inner)
        self.d_gate_up = empty(rows, 2 * inner)
        self.partials = empty(rows, -(-inner // TILES.activation_grad_cols), dtype=torch.float32)
        self.scratch = empty(library.mok_backward_scratch_bytes(hidden, inner) if straddles else 0, dtype=torch.uint8)
        blocks, macro_blocks = capacity_rows // BLOCK_ROWS, rows // BLOCK_ROWS
        self.records = empty(
            library.mok_backward_record_bytes(blocks, macro_blocks, num_local_tokens, hidden, inner, experts), dtype=torch.uint8
        )
        self.weight_maps = empty(4 * experts * _TENSOR_MAP_BYTES, dtype=torch.uint8)

    def pointers(self) -> dict[str, int]:
        return {
            "ring_dy": self.dy.data_ptr(),
            "ring_gate_up": self.gate_up.data_ptr(),
            "ring_d_gate_up": self.d_gate_up.data_ptr(),
            "ring_partials": self.partials.data_ptr(),
            "scratch": self.scratch.data_ptr(),
            "records": self.records.data_ptr(),
            "weight_maps": self.weight_maps.data_ptr(),
        }

    def memory_bytes(self) -> dict[str, int]:
        return {
            "ring.dy": self.dy.nbytes,
            "ring.gate_up": self.gate_up.nbytes,
            "ring.d_gate_up": self.d_gate_up.nbytes,
            "ring.d_router_weights": self.partials.nbytes,
            "wgrad": self.scratch.nbytes,
            "tasks": self.records.nbytes + self.weight_maps.nbytes,
        }
