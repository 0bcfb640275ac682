"""Megatron's versions: what is checked before anything is patched, and the names of Megatron that are wrapped or read.

Written for megatron-core 0.16 to 0.19; tested on 0.16.1 and 0.19.2. ``megatron.training`` is optional: some wheels do not have it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
import sys
from argparse import Namespace
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch.distributed as dist

from mok_megatron.errors import MoKUnsupportedError

logger = logging.getLogger(__name__)

OLDEST = (0, 16)
NEWEST = (0, 19)
"""Releases of megatron-core that this adapter was written for, first and last."""

_MARK = "_mok_wraps"


def megatron_version() -> str:
    """Version of the megatron-core that is installed.

    Raises:
        MoKUnsupportedError: there is none.
    """
    try:
        return importlib.import_module("megatron.core").__version__
    except ImportError as error:
        raise MoKUnsupportedError(f"--moe-backend=mok needs megatron-core, which cannot be imported: {error}") from error


def require_known_megatron() -> None:
    """Refuses a megatron-core whose MoE layer is not the one that MoK takes part in.

    Raises:
        MoKUnsupportedError: too old, or the layer's methods are not the known ones.
    """
    version = megatron_version()
    release = tuple(int(part) for part in version.split(".")[:2])
    if release < OLDEST:
        raise MoKUnsupportedError(f"megatron-core {version} is older than 0.16, the first that mok_megatron supports")
    layer = importlib.import_module("megatron.core.transformer.moe.moe_layer").MoELayer
    expected = {
        "routed_experts_compute": ["self", "hidden_states", "probs"],
        "preprocess": ["self", "hidden_states", "probs", "routing_map"],
        "dispatch": ["self", "hidden_states", "probs"],
        "combine": ["self", "output"],
    }
    for name, parameters in expected.items():
        method = getattr(layer, name, None)
        found = None if method is None else list(inspect.signature(method).parameters)
        if found != parameters:
            raise MoKUnsupportedError(
                f"megatron-core {version}: MoELayer.{name} takes {found}, not {parameters}; this version cannot be patched"
            )
    if release > NEWEST:
        logger.warning("megatron-core %s is newer than 0.19, the last that mok_megatron was written for", version)


def find_module(name: str) -> ModuleType | None:
    """The module, imported if need be; None where it is not installed."""
    try:
        if importlib.util.find_spec(name) is None:
            return None
    except ModuleNotFoundError:
        return None
    return importlib.import_module(name)


def wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces ``owner.name`` by ``make(original)``; nothing happens where that was done before.

    Raises:
        MoKUnsupportedError: ``owner`` has no such attribute.
    """
    original = getattr(owner, name, None)
    if original is None:
        raise MoKUnsupportedError(f"megatron-core {megatron_version()} has no {owner.__name__}.{name}; it cannot be patched")
    if hasattr(original, _MARK):
        return
    wrapper = functools.wraps(original)(make(original))
    setattr(wrapper, _MARK, original)
    setattr(owner, name, wrapper)


def training_args() -> Namespace | None:
    """Megatron's arguments, None where the program does not use ``megatron.training`` or has not parsed them."""
    global_vars = sys.modules.get("megatron.training.global_vars")
    if global_vars is None:
        return None
    try:
        return global_vars.get_args()
    except AssertionError:  # not initialised
        return None


def speaks_for_its_stage() -> bool:
    """Whether this rank writes what a pipeline stage says in the run log: the first of its tensor- and data-parallel ranks."""
    if not dist.is_initialized():
        return True
    parallel_state = importlib.import_module("megatron.core.parallel_state")
    if not parallel_state.is_initialized():
        return dist.get_rank() == 0
    data_parallel_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return data_parallel_rank == 0 and parallel_state.get_tensor_model_parallel_rank() == 0


def mask_expert_bias_counts(router: Any) -> None:
    """Lets a padding mask and expert bias work together: 0.16 to 0.19 apply a mask [T] to a map [T, E] without broadcasting."""
    if hasattr(router, "_apply_expert_bias"):
        # On the instance: the class is also that of layers with another backend.
        router._apply_expert_bias = functools.partial(_count_unmasked_tokens, router)


def _count_unmasked_tokens(router: Any, routing_map: Any, padding_mask: Any = None) -> None:
    if padding_mask is not None:
        routing_map = routing_map & ~padding_mask.reshape(-1, 1)
    type(router)._apply_expert_bias(router, routing_map)
