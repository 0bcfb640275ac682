"""The command line: ``--moe-backend``, one ``--mok-*`` flag for each knob of MoKConfig, and what they do to Megatron's arguments."""

from __future__ import annotations

import os
import types
import typing
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NoReturn

from mok_megatron.config import MoKConfig
from mok_megatron.errors import MoKArgumentError, MoKError
from mok_megatron.megatron import settings, support

DISPATCHER_FLAGS: dict[str, dict[str, Any]] = {
    "alltoall": {"moe_token_dispatcher_type": "alltoall"},
    "deepep": {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"},
    "hybridep": {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"},
}
"""What a stock backend sets in Megatron's arguments, so that an A/B is one flag."""

_KNOB_HELP = {
    "fwd_num_comm_sms": "SMs that only communicate in forward passes. Default: 0, communication warps on every SM.",
    "bwd_num_comm_sms": "SMs that only communicate in backward passes, on GPUs only 0 so far. Default: 0, communication warps on every SM.",
    "minibatch_size": "Rows of one overlap step, a multiple of 128. Default: the two-wave rule.",
    "macrobatch_size": "Rows of the ring, a multiple of the minibatch. Default: from the tokens of a rank, with a margin.",
    "schedule_capacity_multiplier": "Largest share of all the group's routes that one rank may receive; 1.0 cannot overflow.",
    "sm_reserve": "SMs left to other kernels, such as collectives. Default: 0, on GPUs with overlapped collectives 16.",
    "timeout_seconds": "How long a rank waits for a peer before it ends with an error that names it.",
}


def add_mok_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds the flags to ``parser`` and makes its result obey them.

    Once ``parser`` has parsed a command line, the backend is settled: a stock backend has set Megatron's dispatcher flags, and
    for ``mok`` the feature table has been asked; a refused flag ends the program with its name and reason (exit code 2).
    """
    _add_flags(parser)
    _finish_after_parsing(parser)
    return parser


def _add_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group(title="mixture of kittens")
    group.add_argument(
        "--moe-backend",
        choices=settings.BACKENDS,
        default=None,
        help="What runs the routed experts. megatron (the default): what Megatron's own flags say. mok: the fused kernels of "
        "mok_megatron. alltoall, deepep, hybridep: Megatron with that dispatcher. Without the flag the environment variable "
        f"{settings.BACKEND_VARIABLE} is asked.",
    )
    group.add_argument("--mok-config", metavar="FILE.yaml", help="Knobs in a YAML file; single --mok-* flags go before it.")
    group.add_argument(
        "--mok-max-tokens-per-rank",
        type=int,
        help="The most tokens a rank ever brings to an MoE layer in one call. Default: from the sequence length, the "
        "micro-batch size and the parallelism.",
    )
    group.add_argument(
        "--mok-log-expert-load",
        action="store_true",
        help="Log the experts' load of each layer (max/mean, dead experts, standard deviation) at every log interval.",
    )
    for name, value_type in knob_types().items():
        group.add_argument("--mok-" + name.replace("_", "-"), type=value_type, help=_KNOB_HELP.get(name))


def knob_types() -> dict[str, type]:
    """Name and type of each MoKConfig knob; each is a flag ``--mok-<name>``."""
    hints = typing.get_type_hints(MoKConfig)
    return {f.name: _plain_type(hints[f.name]) for f in fields(MoKConfig)}


def _plain_type(hint: Any) -> type:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return hint


def _finish_after_parsing(parser: ArgumentParser) -> None:
    # Megatron imports its parse_args and validate_args by name, before or after us. The parser object is the one thing that
    # every way through them shares: parse_args() calls parse_known_args() on it.
    parse_known_args = parser.parse_known_args

    def parse_and_finish(*args: Any, **kwargs: Any) -> tuple[Namespace, list[str]]:
        namespace, unknown = parse_known_args(*args, **kwargs)
        try:
            finish_arguments(namespace)
        except MoKError as error:
            # Not parser.error(): that prints Megatron's 400 flags first.
            parser.exit(2, f"mok_megatron: {error}\n")
        return namespace, unknown

    parser.parse_known_args = parse_and_finish  # type: ignore[method-assign]


def finish_arguments(args: Namespace) -> None:
    """Settles the backend in freshly parsed arguments.

    Raises:
        MoKArgumentError: a knob has a value that is not allowed.
        MoKUnsupportedError: ``mok`` is asked for together with something it does not support.
        MoKBuildError: ``mok`` is asked for and cannot run here.
    """
    settings.keep_flags(args)
    if args.moe_backend is None:
        args.moe_backend = settings.backend_from_environment() or "megatron"
    for name, value in DISPATCHER_FLAGS.get(args.moe_backend, {}).items():
        setattr(args, name, value)
    run = settings.resolve(args)  # a bad knob is told under every backend, before anything is built
    if args.moe_backend == "mok":
        # A YAML file replaces the arguments after this point: the layers ask again, with what the model is made of.
        if getattr(args, "yaml_cfg", None) is None:
            support.require_supported(args)
        support.require_runnable(support.compute_capability())
        support.require_sms(run.config)


class _RaisingParser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise MoKArgumentError(message)


def check_own_flags(argv: Sequence[str]) -> list[support.Verdict]:
    """The verdict on each of MoK's own flags on a command line, as the run itself reads them.

    Args:
        argv: a command line; flags that are not MoK's are passed over.

    Returns:
        One entry for each flag, and one refusal more where each is good and they do not go together.
    """
    parser = _RaisingParser(add_help=False, allow_abbrev=False)
    _add_flags(parser)
    own = [(flag, texts) for flag, texts in support.split_flags(argv) if support.is_own(flag)]
    verdicts, words = [], []
    for flag, texts in own:
        given = support.join_flags([(flag, texts)])
        words += given
        verdicts.append(_own_verdict(flag, " ".join(texts) or "True", _fault_of_own_flags(parser, given)))
    if all(verdict.verdict != "refused" for verdict in verdicts) and (fault := _fault_of_own_flags(parser, words)):
        verdicts.append(_own_verdict(" ".join(words), "together", fault))
    if all(flag != "--moe-backend" for flag, _ in own):
        try:
            settings.backend_from_environment()
        except MoKArgumentError as error:
            verdicts.append(_own_verdict(settings.BACKEND_VARIABLE, os.environ[settings.BACKEND_VARIABLE], str(error)))
    return verdicts


def _fault_of_own_flags(parser: ArgumentParser, words: Sequence[str]) -> str | None:
    try:
        namespace, unknown = parser.parse_known_args(words)
        namespace.moe_backend = namespace.moe_backend or "mok"  # the environment is another question
        settings.resolve(namespace)
    except MoKArgumentError as error:
        return str(error)
    if not unknown:
        return None
    return "MoK has no such flag" if unknown[0].startswith("--") else "takes one value at most"


def _own_verdict(flag: str, value: str, fault: str | None) -> support.Verdict:
    if fault is None:
        return support.Verdict(flag, value, "supported", "a flag of MoK's own")
    return support.Verdict(flag, value, "refused", fault)
