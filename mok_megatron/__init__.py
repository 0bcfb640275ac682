"""Mixture-of-Kittens backend for Megatron-Core MoE layers.

Importing the package needs no GPU, Transformer Engine, APEX or Megatron, and does not load the compiled library: `mok_megatron.functional`
and `mok_megatron.ops` do. Shape symbols of every docstring: T local tokens, K routes a token, H hidden, I expert intermediate, E experts,
E_local = E / EP, R routed rows of a rank, EP expert-parallel ranks.
"""

from mok_megatron.build import build_info
from mok_megatron.config import MoKConfig
from mok_megatron.errors import (
    MoKArgumentError,
    MoKBuildError,
    MoKCapacityError,
    MoKError,
    MoKPeerError,
    MoKTimeoutError,
    MoKUnsupportedError,
)

__version__ = "0.1.0"

__all__ = [
    "MoKArgumentError",
    "MoKBuildError",
    "MoKCapacityError",
    "MoKConfig",
    "MoKError",
    "MoKPeerError",
    "MoKTimeoutError",
    "MoKUnsupportedError",
    "__version__",
    "build_info",
]
