"""What a run asked of MoK: the backend and its knobs, resolved once a layer from the call, Megatron's arguments and the environment."""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from mok_megatron.config import MoKConfig
from mok_megatron.errors import MoKArgumentError

BACKENDS = ("megatron", "mok", "alltoall", "deepep", "hybridep")
"""``megatron``: Megatron's own flags as they are. The last three: a stock dispatcher, set by this one flag."""

BACKEND_VARIABLE = "MOK_MOE_BACKEND"
"""Environment variable that selects the backend where the command line has no such flag (``--yaml-cfg``, tests)."""


SM_RESERVE_BESIDE_COLLECTIVES = 16
"""SMs that a pass leaves to collectives which Megatron runs beside it, where the user has not said how many.

A pass waits for its peers and needs no SM more than it gets: alone it cannot hold up a peer. But it holds what it has. A collective that
becomes ready in the middle of a pass on all SMs starts at its end; if a peer's host waits for that collective before it launches its own pass
(the allocator frees memory, which waits for the whole GPU), neither ends. A collective's blocks come in clusters of four and make room for
the next ones when they end, so that it needs some SMs and not as many as it has blocks.
"""

_RUNS_BESIDE = ("overlap_grad_reduce", "overlap_param_gather", "overlap_p2p_comm")


@dataclass(frozen=True)
class RunSettings:
    """The backend of the layers built from now on, and what configures it."""

    backend: str = "megatron"
    config: MoKConfig = field(default_factory=MoKConfig)
    max_tokens_per_rank: int | None = None
    log_expert_load: bool = False


@dataclass(frozen=True)
class _Chosen:
    """What ``apply_mok_to_megatron`` was called with; None = not chosen."""

    backend: str | None = None
    config: MoKConfig | None = None
    max_tokens_per_rank: int | None = None
    log_expert_load: bool | None = None


_chosen = _Chosen()


def choose(backend: str | None, config: MoKConfig | None, max_tokens_per_rank: int | None, log_expert_load: bool | None) -> None:
    """Sets what the program chose; it goes before Megatron's arguments and the environment."""
    global _chosen
    if backend is not None:
        check_backend(backend, "backend")
    _chosen = _Chosen(backend, config, max_tokens_per_rank, log_expert_load)


_kept: dict[str, Any] = {}


def keep_flags(args: Namespace) -> None:
    """Remembers this package's flags of a command line whose arguments a YAML file will replace (``--yaml-cfg``)."""
    global _kept
    replaced = getattr(args, "yaml_cfg", None) is not None
    own = {name: value for name, value in vars(args).items() if name == "moe_backend" or name.startswith("mok_")}
    _kept = {name: value for name, value in own.items() if replaced and value is not None and value is not False}


def check_backend(value: Any, source: str) -> str:
    """``value`` if it names a backend.

    Raises:
        MoKArgumentError: it does not; names ``source``.
    """
    if value not in BACKENDS:
        raise MoKArgumentError(f"{source} is {value!r}; it must be one of {', '.join(BACKENDS)}")
    return value


def backend_from_environment() -> str | None:
    """The backend that ``MOK_MOE_BACKEND`` names, or None where it is unset or empty."""
    value = os.environ.get(BACKEND_VARIABLE)
    return check_backend(value, f"environment variable {BACKEND_VARIABLE}") if value else None


def resolve(args: Namespace | None) -> RunSettings:
    """The settings in force.

    Args:
        args: Megatron's arguments (``get_args()``), or None where the program has none.

    Raises:
        MoKArgumentError: a value is not one of those allowed.
    """
    if _kept:
        args = Namespace(**{**(vars(args) if args is not None else {}), **_kept})
    backend = _chosen.backend or _backend_from_args(args) or backend_from_environment() or "megatron"
    config = _chosen.config or config_from_args(args)
    max_tokens = _chosen.max_tokens_per_rank
    if max_tokens is None:
        max_tokens = getattr(args, "mok_max_tokens_per_rank", None)
    if max_tokens is not None and max_tokens < 1:
        raise MoKArgumentError(f"--mok-max-tokens-per-rank is {max_tokens}; it must be at least 1")
    log_load = _chosen.log_expert_load
    if log_load is None:
        log_load = bool(getattr(args, "mok_log_expert_load", False))
    return RunSettings(backend, config, max_tokens, log_load)


def _backend_from_args(args: Namespace | None) -> str | None:
    value = getattr(args, "moe_backend", None)
    return None if value is None else check_backend(value, "--moe-backend")


def config_from_args(args: Namespace | None) -> MoKConfig:
    """MoKConfig of ``--mok-config`` (a YAML file) with the single ``--mok-*`` flags on top.

    On GPUs :data:`SM_RESERVE_BESIDE_COLLECTIVES` is the default of ``sm_reserve`` where there is no file and collectives are overlapped.

    Raises:
        MoKArgumentError: the file or a value is not valid.
    """
    path = getattr(args, "mok_config", None)
    config = MoKConfig.from_yaml(path) if path else MoKConfig()
    given = {f.name: getattr(args, f"mok_{f.name}", None) for f in fields(MoKConfig)}
    if not path and given["sm_reserve"] is None and _collectives_run_beside(args):
        given["sm_reserve"] = SM_RESERVE_BESIDE_COLLECTIVES
    return replace(config, **{name: value for name, value in given.items() if value is not None})


def _collectives_run_beside(args: Namespace | None) -> bool:
    alone = getattr(args, "expert_model_parallel_size", 1) in (None, 1)
    return torch.cuda.is_available() and not alone and any(getattr(args, name, False) for name in _RUNS_BESIDE)
