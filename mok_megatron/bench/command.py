"""``python -m mok_megatron.bench`` and ``mok-megatron bench``. Exit codes: 0 good, 1 a row is wrong or failed, 2 wrong argument."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from mok_megatron.errors import MoKArgumentError

_EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's own) and return its exit code."""
    from mok_megatron.bench.run import run
    from mok_megatron.bench.settings import BenchSettings

    values = vars(_parser().parse_args(argv))
    del values["benchmark"]
    try:
        return run(BenchSettings(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}))
    except MoKArgumentError as error:
        print(f"mok-megatron bench layer: {error}", file=sys.stderr)
        return _EXIT_USAGE


def _parser() -> argparse.ArgumentParser:
    from mok_megatron.bench.phases import PHASES
    from mok_megatron.bench.rows import COMPETITORS
    from mok_megatron.bench.settings import EP_SIZES, BenchSettings
    from mok_megatron.bench.shapes import TINY, config_names
    from mok_megatron.bench.workloads import WORKLOADS

    parser = argparse.ArgumentParser(prog="mok-megatron bench", description="Measures MoK beside its competitors.")
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="{layer}")
    layer = benchmarks.add_parser(
        "layer",
        help="one MoE layer after the router: dispatch, experts, combine",
        description="Times forward, forward and backward, and the backward alone of one MoE layer for given routes: MoK, baselines and "
        "the bare grouped GEMMs, in turn in one run, on the same inputs and weights. Every row is checked against an FP64 reference before "
        "and after, gradients too. Prints a table for each shape and writes layer.json and layer.png. Start it alone (it starts one "
        "process a GPU) or under torchrun.",
        formatter_class=_HelpFormatter,
    )
    default = BenchSettings.__dataclass_fields__
    names = ", ".join([*config_names(), TINY.model])
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    shapes = f"{names}, or a YAML file; none: all models, on the CPU {TINY.model}"
    layer.add_argument("--shapes", nargs="+", default=(), metavar="NAME", help=shapes)
    layer.add_argument("--tokens", nargs="+", type=_integer(1), default=(), metavar="T", help="tokens a GPU; none: 4096, on the CPU 96")
    sizes = ", ".join(map(str, EP_SIZES))
    layer.add_argument("--ep", type=_integer(1), default=launched, help=f"expert-parallel ranks, one a GPU: one of {sizes}")
    layer.add_argument("--workload", nargs="+", default=default["workload"].default, metavar="NAME", help=", ".join(WORKLOADS))
    rows = "; ".join(f"{name}: {row.label}" for name, row in COMPETITORS.items())
    layer.add_argument("--rows", nargs="+", default=default["rows"].default, metavar="NAME", help=rows)
    layer.add_argument(
        "--phases", nargs="+", default=default["phases"].default, metavar="NAME", help=", ".join(PHASES) + ", of the rows that have them"
    )
    layer.add_argument("--iterations", type=_integer(1), default=default["iterations"].default, help="timed rounds over all rows")
    layer.add_argument("--warmup", type=_integer(0), default=default["warmup"].default, help="untimed rounds of each shape")
    layer.add_argument("--seed", type=_integer(0), default=default["seed"].default, help="of routes, inputs and weights")
    layer.add_argument("--knob", nargs="+", dest="knobs", default=(), metavar="NAME=VALUE", help="knobs of MoK on top of the shape's own")
    layer.add_argument("--out", type=Path, default=default["out"].default, help="folder for layer.json and layer.png")
    layer.add_argument("--device", default=default["device"].default, help="cuda, or cpu to try the benchmark itself")
    return parser


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Lists as they are typed; an empty default is told in the option's own text."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if not isinstance(action.default, tuple):
            return super()._get_help_string(action)
        return f"{action.help} (default: {' '.join(action.default)})" if action.default else action.help


def _integer(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least {least}")
        return value

    return parse
