"""The feature table: what each Megatron flag means for ``--moe-backend=mok``, as data.

Asked with Megatron's arguments when they have been parsed, with the TransformerConfig when a layer is built, and by
``mok-megatron doctor`` with a command line. The rows are in :mod:`mok_megatron.megatron.feature_table`; here is what reads them.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mok_megatron import build
from mok_megatron.config import MoKConfig
from mok_megatron.errors import MoKBuildError, MoKUnsupportedError
from mok_megatron.megatron.feature_table import FEATURES, MISSING, OFF_SWITCHES, Feature, Values

__all__ = [
    "FEATURES",
    "NAMED_FLAGS",
    "Feature",
    "Verdict",
    "check_arguments",
    "compute_capability",
    "is_own",
    "join_flags",
    "namespace_from_argv",
    "require_runnable",
    "require_sms",
    "require_supported",
    "split_flags",
]

NAMED_FLAGS = frozenset(
    {feature.flag for feature in FEATURES} | {"--" + name.replace("_", "-") for f in FEATURES for name in f.covers} | {*OFF_SWITCHES}
)
"""Flags that the feature table names, as they are spelled on a command line."""


@dataclass(frozen=True)
class Verdict:
    """What MoK says to one flag as it is set."""

    flag: str
    value: Any
    verdict: str
    """``supported``, ``transparent`` (MoK has nothing to do with it) or ``refused``."""
    reason: str


def check_arguments(argv_or_namespace: Sequence[str] | Any) -> list[Verdict]:
    """The verdict on each flag that is set and that the feature table knows, refusals first.

    Args:
        argv_or_namespace: a command line (Megatron's flags, without the program), or an object whose attributes are Megatron's
            arguments or a TransformerConfig's fields.

    Returns:
        One entry for each row of the table that applies, and a refusal for each number that is none; what is refused is not called
        supported or transparent as well. For a command line also one for each flag that none of these is about: ``supported``
        where the table has rows for other values of it, else ``transparent``, as it is outside of the routed experts.
    """
    from_command_line = isinstance(argv_or_namespace, (list, tuple))
    source = namespace_from_argv(argv_or_namespace) if from_command_line else argv_or_namespace
    values = Values(source, dict(os.environ), from_command_line=from_command_line)
    refusals = [Verdict("--" + name.replace("_", "-"), getattr(source, name), "refused", reason) for name, reason in values.malformed.items()]
    rows = [feature for feature in FEATURES if _applies(feature, values)]
    refused = set(values.malformed).union(*(row.attributes for row in rows if row.verdict == "refused"))
    rows = [row for row in rows if row.verdict == "refused" or not row.attributes & refused]
    verdicts = refusals + [Verdict(row.flag, _shown(row, values.first(*row.names), values), row.verdict, row.reason) for row in rows]
    if from_command_line:
        told = refused.union(*(row.attributes for row in rows))
        verdicts += [_verdict_without_row(flag, value, name) for name, (flag, value) in _typed(argv_or_namespace).items() if name not in told]
    return sorted(verdicts, key=lambda v: v.verdict != "refused")


def _applies(feature: Feature, values: Values) -> bool:
    value = values.first(*feature.names)
    return not (value is MISSING and feature.names) and feature.applies(value, values)


_NAMED_ATTRIBUTES = set().union(*(feature.attributes for feature in FEATURES))


def _verdict_without_row(flag: str, value: Any, name: str) -> Verdict:
    if name in _NAMED_ATTRIBUTES:
        return Verdict(flag, value, "supported", "nothing stands against this value")
    return Verdict(flag, value, "transparent", "outside of the routed experts")


def _shown(feature: Feature, value: Any, values: Values) -> Any:
    return feature.shown(values) if feature.shown is not None else value


def require_supported(source: Any) -> None:
    """Refuses a run that MoK cannot do right.

    Args:
        source: Megatron's arguments or a TransformerConfig.

    Raises:
        MoKUnsupportedError: names each refused flag, its value and the reason.
    """
    refused = [v for v in check_arguments(source) if v.verdict == "refused"]
    if refused:
        lines = "\n".join(f"  {v.flag} (is {v.value}): {v.reason}" for v in refused)
        raise MoKUnsupportedError(f"--moe-backend=mok does not support this run:\n{lines}")


def compute_capability() -> tuple[int, int] | None:
    """Of the GPU that this process trains on, (major, minor); None where it sees none and Megatron runs on the CPU."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def num_sms() -> int | None:
    """Multiprocessors of the GPU that this process trains on; None where it sees none."""
    return torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else None


def require_sms(config: MoKConfig) -> None:
    """Refuses knobs that leave a pass no multiprocessors on the GPU that this process trains on.

    Raises:
        MoKArgumentError: names the knob, its value and the rule.
    """
    if (sms := num_sms()) is not None:
        config.check_sms(sms)


def require_runnable(capability: tuple[int, int] | None) -> None:
    """Refuses to start where MoK was asked for and cannot run; there is no silent other way.

    Args:
        capability: what :func:`compute_capability` says.

    Raises:
        MoKBuildError: the compiled library is missing, does not fit, or has no kernels for a GPU of this capability.
    """
    try:
        build.load_library()
        if capability is not None:
            build.check_device_architecture(build.build_info(), capability)
    except MoKBuildError as error:
        raise MoKBuildError(f"--moe-backend=mok was asked for and cannot run here: {error}") from error


def split_flags(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each ``--flag`` of a command line with the texts that belong to it; what stands before the first is left out."""
    found: list[tuple[str, list[str]]] = []
    for word in argv:
        if word.startswith("--"):
            flag, separator, text = word.partition("=")
            found.append((flag, [text] if separator else []))
            takes_more = not separator
        elif found and takes_more:
            found[-1][1].append(word)
    return found


def is_own(flag: str) -> bool:
    """Whether a flag is one of MoK's own."""
    return flag == "--moe-backend" or flag.startswith("--mok-")


def join_flags(flags: Sequence[tuple[str, list[str]]]) -> list[str]:
    """The command line that :func:`split_flags` takes apart into ``flags``."""
    return [word for flag, texts in flags for word in ([f"{flag}={texts[0]}"] if len(texts) == 1 else [flag, *texts])]


def namespace_from_argv(argv: Sequence[str]) -> Namespace:
    """Megatron's flags as attributes, read without Megatron: ``--some-flag 3`` is ``some_flag=3``.

    A flag without a value is True; ``--no-x``, ``--disable-x`` and the flags whose attribute has another name are translated.
    """
    return Namespace(**{name: False if _switches_off(flag, value) else value for name, (flag, value) in _typed(argv).items()})


def _typed(argv: Sequence[str]) -> dict[str, tuple[str, Any]]:
    """Each attribute that a command line sets, with the flag as it is spelled there and its value; the last of several holds."""
    found = {}
    for flag, texts in split_flags(argv):
        value = True if not texts else _parse(texts[0]) if len(texts) == 1 else [_parse(t) for t in texts]
        name = flag[2:].replace("-", "_")
        if _switches_off(flag, value):
            name = name.split("_", 1)[1]
        found[_RENAMED.get(name, name)] = (flag, value)
    return found


def _switches_off(flag: str, value: Any) -> bool:
    return flag.startswith(("--no-", "--disable-")) and value is True


_RENAMED = {
    "bias_linear": "add_bias_linear",
    "fp8_format": "fp8",
    "fp4_format": "fp4",
    "fp8_param_gather": "fp8_param",
    "fp4_param_gather": "fp4_param",
}


def _parse(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)
