#!/usr/bin/env python
"""Writes docs/feature-table.md from the rows that the adapter itself reads. Run it after changing them."""

from __future__ import annotations

from pathlib import Path

from mok_megatron.megatron.feature_table import FEATURES

TARGET = Path(__file__).resolve().parents[1] / "docs" / "feature-table.md"
MEANING = {
    "supported": "MoK handles it.",
    "transparent": "MoK has nothing to do with it; it works as in Megatron.",
    "refused": "A run that has it set so stops at its start, with the flag and the reason.",
}

NO_FLAGS = {
    "fields of TransformerConfig": (
        "--add-bias-linear", "--cpu-offloading", "--gradient-accumulation-fusion", "--use-kitchen", "--variable-seq-lengths",
    ),
    "flags or fields of other versions": (
        "--dynamic-context-parallel", "--moe-combine-bwd-dtype", "--moe-dispatch-fwd-dtype", "--moe-use-grouped-tensor",
        "--moe-use-legacy-grouped-gemm",
    ),
    "flags that a script adds": ("--export-te-mcore-model", "--lora-rank", "--modelopt-enabled"),
}  # fmt: skip
"""Names in the table that Megatron-Core 0.19.2's own parser does not have, by what they are."""


def render() -> str:
    """The whole document."""
    lines = [
        "# Megatron's flags under `--moe-backend=mok`",
        "",
        "Written by `python scripts/feature_table.py` from `mok_megatron/megatron/feature_table.py`. A flag can have several rows,",
        "as its values can differ in what they mean; a value that no row is about is taken. Megatron's flags that are not here are",
        "outside of the routed experts and work as in Megatron. `mok-megatron doctor -- pretrain_gpt.py FLAGS` gives the verdicts on a",
        "command line.",
        "",
        "A name is a flag of Megatron's, or an attribute of its arguments or its TransformerConfig that is spelled as a flag would be,",
        "or the environment variable `PYTORCH_ALLOC_CONF`. These names are not flags of Megatron-Core 0.19.2's own parser:",
        "",
        *(f"* {kind}: {', '.join(f'`{name}`' for name in names)}" for kind, names in NO_FLAGS.items()),
    ]
    for verdict, meaning in MEANING.items():
        rows = [feature for feature in FEATURES if feature.verdict == verdict]
        lines += ["", f"## {verdict.capitalize()}", "", meaning, "", "| flag | |", "|---|---|"]
        lines += [f"| `{row.flag}` | {row.reason} |" for row in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render())
