"""How the CUDA executor tells its kernels where weight gradients go."""

import pytest
import torch

from mok_megatron.errors import MoKArgumentError
from mok_megatron.executors.cpu import WeightGradTarget
from mok_megatron.executors.cuda_backward import grad_words


@pytest.mark.parametrize(
    ("dtype", "overwrite", "flags"),
    [(torch.float32, False, 0), (torch.float32, True, 1), (torch.bfloat16, False, 2), (torch.bfloat16, True, 3)],
)
def test_flags(dtype: torch.dtype, overwrite: bool, flags: int) -> None:
    grad = torch.zeros(64, 64, dtype=dtype)
    assert grad_words("g", [WeightGradTarget(None, True), WeightGradTarget(grad, overwrite)]) == [0, grad.data_ptr() + flags]


def test_what_the_kernels_cannot_write_is_refused() -> None:
    memory = torch.zeros(64 * 64 + 1)
    with pytest.raises(MoKArgumentError, match=r"g\[0\]: address .* multiple of 16"):
        grad_words("g", [WeightGradTarget(memory[1:].view(64, 64), False)])
    with pytest.raises(MoKArgumentError, match=r"g\[1\]: strides"):
        grad_words("g", [WeightGradTarget(None, False), WeightGradTarget(torch.zeros(64, 64).t(), False)])
