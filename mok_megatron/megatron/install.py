"""The one public way in: :func:`apply_mok_to_megatron`."""

from __future__ import annotations

import importlib
import inspect
import logging
from typing import Any

from mok_megatron.config import MoKConfig
from mok_megatron.errors import MoKUnsupportedError
from mok_megatron.megatron import arguments, compat, metrics, microbatch, settings, support

logger = logging.getLogger(__name__)

_announced: set[str] = set()


def apply_mok_to_megatron(
    *,
    backend: str | None = None,
    config: MoKConfig | None = None,
    max_tokens_per_rank: int | None = None,
    log_expert_load: bool | None = None,
) -> None:
    """Makes Megatron offer MoK: its command line gets the flags, and MoE layers built from now on use the backend asked for.

    Call it before the model is built; it does not matter whether Megatron's modules were imported before. Calling it again changes
    what was chosen, for layers built after that. A layer keeps its backend for its life.

    Args:
        backend: goes before ``--moe-backend`` and ``MOK_MOE_BACKEND``; one of megatron, mok, alltoall, deepep, hybridep.
        config: goes before ``--mok-config`` and the ``--mok-*`` flags.
        max_tokens_per_rank: goes before ``--mok-max-tokens-per-rank``.
        log_expert_load: goes before ``--mok-log-expert-load``.

    Raises:
        MoKArgumentError: an unknown backend.
        MoKUnsupportedError: this megatron-core cannot be patched.
    """
    settings.choose(backend, config, max_tokens_per_rank, log_expert_load)
    compat.require_known_megatron()
    moe_layer = importlib.import_module("megatron.core.transformer.moe.moe_layer")
    compat.wrap(moe_layer.MoELayer, "__init__", _choose_backend_of_layer)
    microbatch.follow_schedules()
    if (training_arguments := compat.find_module("megatron.training.arguments")) is not None:
        compat.wrap(training_arguments, "add_megatron_arguments", _add_flags)
        compat.wrap(importlib.import_module("megatron.training.training"), "training_log", _log_load_too)


def _add_flags(add_megatron_arguments: Any) -> Any:
    def add_arguments(parser: Any) -> Any:
        return arguments.add_mok_arguments(add_megatron_arguments(parser))

    return add_arguments


def _choose_backend_of_layer(build: Any) -> Any:
    signature = inspect.signature(build)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs).arguments
        config = bound["config"]
        run = settings.resolve(compat.training_args())
        if run.backend == "mok":
            _build_mok_layer(build, self, run, args, kwargs, bound)
        elif run.backend == "megatron":
            build(self, *args, **kwargs)
        else:
            for name, value in arguments.DISPATCHER_FLAGS[run.backend].items():
                setattr(config, name, value)
            build(self, *args, **kwargs)
        _announce(run, config)

    return init


def _build_mok_layer(build: Any, layer: Any, run: settings.RunSettings, args: Any, kwargs: Any, bound: dict[str, Any]) -> None:
    moe_layer = importlib.import_module("megatron.core.transformer.moe.moe_layer")
    config = bound["config"]
    if (run_args := compat.training_args()) is not None:
        support.require_supported(run_args)  # of a YAML file, or changed since they were parsed
    support.require_supported(config)
    support.require_runnable(support.compute_capability())
    support.require_sms(run.config)
    if type(layer) is not moe_layer.MoELayer:
        raise MoKUnsupportedError(f"--moe-backend=mok takes the place of MoELayer's experts, and {type(layer).__name__} is a class of its own")
    pg_collection = bound.get("pg_collection")
    if pg_collection is None:
        pg_collection = importlib.import_module("megatron.core.transformer.moe.moe_utils").get_default_pg_collection()
    # The stock dispatcher is thrown away. AllGather's needs neither streams nor a library to be made.
    asked, config.moe_token_dispatcher_type = config.moe_token_dispatcher_type, "allgather"
    try:
        build(layer, *args, **kwargs)
    finally:
        config.moe_token_dispatcher_type = asked
    # Loads the compiled library, which a run with another backend does not need.
    importlib.import_module("mok_megatron.megatron.layer").adopt(layer, run, pg_collection)


def _announce(run: settings.RunSettings, config: Any) -> None:
    """Says once in the run log which backend runs."""
    if run.backend == "mok":
        knobs = {k: v for k, v in run.config.to_dict().items() if v is not None}
        text = f"MoE backend: mok (Mixture-of-Kittens on the {_executor()}; {', '.join(f'{k}={v}' for k, v in knobs.items())})"
    else:
        dispatcher = config.moe_token_dispatcher_type
        if dispatcher == "flex":
            dispatcher += f"/{getattr(config, 'moe_flex_dispatcher_backend', 'deepep')}"
        why = "as Megatron's flags say" if run.backend == "megatron" else f"set by --moe-backend={run.backend}"
        text = f"MoE backend: megatron with the {dispatcher} dispatcher ({why})"
    if text in _announced:
        return
    _announced.add(text)
    say(text)


def _executor() -> str:
    capability = support.compute_capability()
    return "CPU executor" if capability is None else f"GPU, kernels for sm_{capability[0]}{capability[1]}a"


def say(text: str) -> None:
    """One line in the run log, by one rank of a pipeline stage: a stage knows its own layers only."""
    if compat.speaks_for_its_stage():
        print(f"mok_megatron: {text}", flush=True)


def _log_load_too(training_log: Any) -> Any:
    signature = inspect.signature(training_log)

    def log(*args: Any, **kwargs: Any) -> Any:
        result = training_log(*args, **kwargs)
        run_args = compat.training_args()
        if getattr(run_args, "mok_log_expert_load", False):
            # A wrapper without names may stand between: then Megatron's own count of finished iterations tells.
            arguments = signature.bind(*args, **kwargs).arguments
            iteration = arguments["iteration"] if "iteration" in arguments else run_args.curr_iteration + 1
            if iteration % run_args.log_interval == 0:
                for line in metrics.collect().lines():
                    say(f"iteration {iteration}: expert load, {line}")
        return result

    return log
