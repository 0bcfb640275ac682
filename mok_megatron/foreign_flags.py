"""Flags of a command line that neither MoK nor the feature table names: Megatron's, a script's own, or mistyped.

Neither Megatron nor the script is imported into this process: the one is asked in a process of its own, the other's source is read.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_READ_FLAGS = """
import argparse, dataclasses, json, sys
sys.path[:] = json.loads(sys.argv[1])
try:
    from megatron.training.arguments import add_megatron_arguments
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    flags, has_parser = list(parser._option_string_actions), True
except Exception:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig
    kinds = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    names = {field.name.replace("_", "-") for kind in kinds for field in dataclasses.fields(kind)}
    flags, has_parser = [before + name for name in names for before in ("--", "--no-", "--disable-")], False
print()
print(json.dumps([flags, has_parser]))
"""


@functools.cache
def megatron_flags(folder: str | None) -> tuple[frozenset[str], bool]:
    """The flags that Megatron's parser has, and True; without a parser the fields of Megatron-Core's configs as flags, and False.

    Read in a process of its own that sees no GPU, as Megatron imports Transformer Engine and APEX where they are.

    Args:
        folder: of the script, which a run searches before all others.
    """
    path = json.dumps([*([folder] if folder else []), *sys.path])
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    try:
        answer = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _READ_FLAGS, path], capture_output=True, text=True, timeout=120, check=True, env=environment
        )
        flags, has_parser = json.loads(answer.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return frozenset(), False
    return frozenset(flags), has_parser


_MODELOPT_FLAGS = ("--export-", "--modelopt-", "--finetune-", "--enable-gpt-oss", "--freeze-base-for-mtp", "--qad-")
"""How the flags begin that Megatron's own pretrain_gpt.py adds where megatron.post_training can be imported."""


def judge_foreign_flags(flags: Sequence[str], script: str | None, *, launched: bool) -> dict[str, tuple[str, str]]:
    """Verdict and reason of each flag that neither MoK, the feature table nor Megatron knows as it is spelled.

    Megatron's parser takes no abbreviations and stops at a flag that it does not know, but a script can add flags. So a flag is
    refused where the script can be read, uses Megatron's parser and does not name it, or where the script is sure to add nothing.

    Args:
        flags: as they are spelled, each once or more.
        script: path of the script, None where the command line has none.
        launched: whether the command line begins with a program, which without a script may be any.
    """
    from mok_megatron.megatron.support import NAMED_FLAGS, is_own

    own = {"--moe-backend"}
    asked = [flag for flag in dict.fromkeys(flags) if not is_own(flag) and flag not in NAMED_FLAGS]
    if not asked:
        return {}
    here = Path(script) if script is not None and Path(script).is_file() else None
    known, has_parser = megatron_flags(str(here.resolve().parent) if here else None)
    asked = [flag for flag in asked if flag not in known]
    sources = _read_sources(here) if here and asked else None
    verdicts = {}
    for flag in asked:
        close = difflib.get_close_matches(flag, known | NAMED_FLAGS | own if has_parser else NAMED_FLAGS | own, n=1, cutoff=0.8)
        meant = f"; is {close[0]} meant?" if close else ""
        if sources and sources.may_add(flag):
            verdicts[flag] = "unknown", f"{script} seems to add it to Megatron's flags; not judged"
        elif not has_parser:
            verdicts[flag] = "unknown", f"unknown to this Megatron-Core and to MoK; not judged{meant}"
        elif sources and sources.uses_megatron_parser:
            verdicts[flag] = "refused", f"Megatron has no such flag, and {script} adds none of that name, as far as its source tells{meant}"
        elif here or (script is None and launched):
            verdicts[flag] = "unknown", f"Megatron has no such flag; what {script or 'the program'} adds cannot be read; not judged{meant}"
        elif script is None:
            verdicts[flag] = "refused", f"Megatron has no such flag; if a script adds it, name the script before the flags{meant}"
        elif Path(script).name == "pretrain_gpt.py" and not flag.startswith(_MODELOPT_FLAGS):
            verdicts[flag] = "refused", f"Megatron has no such flag; if your {script} adds it, give its path, so that it can be read{meant}"
        else:
            verdicts[flag] = "unknown", f"Megatron has no such flag; {script} may add it, but is not here to be read; not judged{meant}"
    return verdicts


@dataclasses.dataclass(frozen=True)
class _Sources:
    """What a script and the modules that it imports say about flags, by their text: nothing of them is run."""

    texts: frozenset[str]
    """String constants that are a flag, or a flag's beginning: they end in ``-`` or ``_``."""
    fields: frozenset[str]
    """Names of annotated fields of classes, from which flags can be made."""
    uses_megatron_parser: bool
    """Whether the script hands its command line to Megatron's parser, which stops at unknown flags."""

    def may_add(self, flag: str) -> bool:
        name = flag[2:].replace("-", "_")
        begins = tuple(text for text in self.texts if text.endswith(("-", "_")))
        return (
            flag in self.texts
            or flag.startswith(begins)
            or {name, name.removeprefix("no_"), name.removeprefix("disable_")} & self.fields != set()
        )


_MOST_SOURCES = 300
_NOT_FOLLOWED = (
    *sys.stdlib_module_names,
    "torch",
    "numpy",
    "megatron.core",
    "megatron.training",
    "transformer_engine",
    "transformers",
    "mok_megatron",
)
"""Modules that add no flags of a script: what Megatron's parser has is known by itself."""
_PARSES = ("pretrain", "initialize_megatron", "parse_args", "parse_and_validate_args")
"""What of megatron.training reads the command line with Megatron's parser."""


def _read_sources(script: Path) -> _Sources | None:
    """The script's and its imports' words on flags; None where the script cannot be parsed."""
    search = [script.resolve().parent, *(Path(entry) for entry in sys.path)]
    texts: set[str] = set()
    fields: set[str] = set()
    modules: set[str] = set()
    waiting, seen = [script.resolve()], set()
    goes_round_parser = False
    while waiting and len(seen) < _MOST_SOURCES:
        path = waiting.pop(0)
        if path in seen:
            continue
        seen.add(path)
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            if len(seen) == 1:
                return None
            continue
        installed = "site-packages" in path.parts or "dist-packages" in path.parts
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"--[\w-]*", node.value):
                texts.add(node.value)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                fields.add(node.target.id)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names = _imported(node)
                modules |= set(names)
                if installed and not getattr(node, "level", 0):  # of an installed package no more than itself
                    names = [name for name in names if name.split(".")[0] in path.parts]
                waiting += _files_of(names, [path.parents[node.level - 1]] if getattr(node, "level", 0) else search)
            elif not installed:
                goes_round_parser |= isinstance(node, ast.keyword) and node.arg == "ignore_unknown_args"
                goes_round_parser |= isinstance(node, ast.Attribute) and node.attr in ("parse_known_args", "argv")
    parses = any(name.startswith("megatron.training.") and name.split(".")[-1] in _PARSES for name in modules)
    return _Sources(frozenset(texts), frozenset(fields), parses and not goes_round_parser and len(seen) < _MOST_SOURCES)


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Dotted names that an import may be of; names of attributes among them, which no file has."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    before = f"{node.module}." if node.module else ""
    return [*([node.module] if node.module else []), *(before + alias.name for alias in node.names)]


def _files_of(names: Sequence[str], search: Sequence[Path]) -> list[Path]:
    files = []
    for name in names:
        if any(name == left or name.startswith(f"{left}.") for left in _NOT_FOLLOWED):
            continue
        candidates = (folder.joinpath(*name.split(".")) for folder in search)
        ways = (way for base in candidates for way in (base.with_suffix(".py"), base / "__init__.py"))
        files += [way.resolve() for way in ways if way.is_file()][:1]
    return files
