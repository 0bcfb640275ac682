"""Lists of tensors that come in every call, recognised in one step instead of a look at each.

A layer of E_local experts brings up to 4 * E_local tensors to a call. What a check found out about a list is written down as torch's own
guards, which compare every tensor anew: type, sizes, strides, dtype, device and requires_grad. Nothing is known by identity, so that a tensor
whose storage or form was exchanged is seen, and no tensor is kept alive. Addresses are no part of it.
"""

from collections.abc import Sequence

import torch

try:
    # Private, and the only way to compare many tensors by one call from Python.
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # a torch without it: every list gets the full check
    TensorGuards = None


class KnownTensors:
    """The form of a list of tensors that passed a check."""

    def __init__(self) -> None:
        self._guards: TensorGuards | None = None
        self._count = 0

    def match(self, tensors: object) -> bool:
        """Whether this is a list or tuple of tensors of the form learnt last, one by one. False tells nothing: the check decides."""
        kind = type(tensors)
        return (kind is list or kind is tuple) and len(tensors) == self._count and self._guards is not None and self._guards.check(*tensors)

    def learn(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take a list's form as good, in place of any other."""
        if TensorGuards is not None:
            # None: no size and no stride may differ.
            self._guards, self._count = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None), len(tensors)
