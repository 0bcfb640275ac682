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
from mok_megatron.megatron.feature_table import FEATURES, MISSING, Feature, Values

__all__ = [
    "FEATURES",
    "Feature",
    "Verdict",
    "check_arguments",
    "compute_capability",
    "namespace_from_argv",
    "require_runnable",
    "require_sms",
    "require_supported",
    "split_flags",
]


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
        One entry for each row of the table that applies, and a refusal for each number that is none. For a command line also one
        for each flag that no row names (``transparent``: outside of the routed experts).
    """
    from_command_line = isinstance(argv_or_namespace, (list, tuple))
    source = namespace_from_argv(argv_or_namespace) if from_command_line else argv_or_namespace
    values = Values(source, dict(os.environ), from_command_line=from_command_line)
    verdicts = [Verdict("--" + name.replace("_", "-"), getattr(source, name), "refused", reason) for name, reason in values.malformed.items()]
    for feature in FEATURES:
        value = values.first(*feature.names)
        if value is MISSING and feature.names:
            continue
        if feature.applies(value, values):
            verdicts.append(Verdict(feature.flag, _shown(feature, value, values), feature.verdict, feature.reason))
    if from_command_line:
        known = {name for feature in FEATURES for name in feature.names}
        verdicts += [
            Verdict("--" + name.replace("_", "-"), value, "transparent", "outside of the routed experts")
            for name, value in vars(source).items()
            if name not in known and name not in values.malformed
        ]
    return sorted(verdicts, key=lambda v: v.verdict != "refused")


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


def namespace_from_argv(argv: Sequence[str]) -> Namespace:
    """Megatron's flags as attributes, read without Megatron: ``--some-flag 3`` is ``some_flag=3``.

    A flag without a value is True; ``--no-x``, ``--disable-x`` and the flags whose attribute has another name are translated.
    """
    found = Namespace()
    for flag, texts in split_flags(argv):
        value = True if not texts else _parse(texts[0]) if len(texts) == 1 else [_parse(t) for t in texts]
        name = flag[2:].replace("-", "_")
        if name.startswith(("no_", "disable_")) and value is True:
            name, value = name.split("_", 1)[1], False
        setattr(found, _RENAMED.get(name, name), value)
    return found


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
