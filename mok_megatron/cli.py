"""The ``mok-megatron`` command. Exit codes: 0 good, 1 the answer is no, 2 wrong argument, 3 a demo has no answer, 130 interrupted."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mok_megatron import __version__
from mok_megatron.errors import MoKError

EXIT_NO = 1
EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line ``argv`` (default: the process's own) and returns its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["bench"]:  # a parser of its own, which knows shapes and baselines
        from mok_megatron.bench.command import main as bench

        return bench(argv[1:])
    parser = _parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        hint = "; a command line goes behind --" if arguments.command == "doctor" else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    try:
        return arguments.run(arguments)
    except MoKError as error:
        print(f"mok-megatron {arguments.command}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mok-megatron", description="Mixture-of-Kittens backend for Megatron-Core.")
    parser.add_argument("--version", action="version", version=f"mok_megatron {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{doctor,demo,bench}")
    _add_doctor(commands)
    _add_demo(commands)
    commands.add_parser("bench", help="measure MoK beside its competitors", add_help=False)
    return parser


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="what this machine has, what MoK supports on it, and a verdict on each flag of a Megatron command line",
        description="Prints what was found on this machine and what MoK supports on it. Never initialises CUDA. "
        "Exit code 0: MoK can be used; 1: something found, or a flag of the command line, stands against it.",
        epilog="example: mok-megatron doctor -- pretrain_gpt.py --num-experts 8 --swiglu --disable-bias-linear "
        "--no-gradient-accumulation-fusion",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("megatron_command", nargs="*", metavar="-- SCRIPT FLAGS", help="a Megatron command line to judge, script first")
    parser.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    from mok_megatron import doctor

    answer = doctor.diagnose(arguments.megatron_command)
    print(json.dumps(answer, indent=1) if arguments.json else doctor.to_text(answer))
    return 0 if answer["healthy"] else EXIT_NO


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from mok_megatron.demo.settings import DemoSettings

    parser = commands.add_parser(
        "demo",
        help="train a small GPT MoE model with AllToAll and with MoK, and compare",
        description="Trains a small GPT MoE model of Megatron-Core with Megatron's own dispatchers and with "
        "--moe-backend=mok, from the same weights on the same batches, and reports how far the losses are apart next to "
        "the floor that Megatron's own dispatchers set. Exit code 0: within four times the floor; 1: not; "
        "3: no answer, the training failed or its report could not be written.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    options = {
        "out": "folder for report.md, report.json and loss.png",
        "steps": "training steps of each run",
        "ranks": "processes, and expert-parallel size, 1 to 8",
        "seed": "seed of the weights and of the data",
        "dtype": "bf16 or fp32",
        "num_layers": "transformer layers, each with experts",
        "num_experts": "experts of a layer, a multiple of --ranks",
        "topk": "experts a token is routed to",
        "hidden_size": "a multiple of 64",
        "ffn_hidden_size": "intermediate size of an expert, a multiple of 64",
        "seq_length": "tokens of a sample",
        "micro_batch_size": "samples of a microbatch",
        "num_microbatches": "microbatches of a step on each rank",
        "timeout_seconds": "end everything when the whole demo takes longer",
    }
    defaults = {field.name: field.default for field in dataclasses.fields(DemoSettings)}
    for name, text in options.items():
        default = defaults[name]
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default) if name != "out" else Path, default=default, help=text)
    parser.set_defaults(run=_demo, options=tuple(options))


def _demo(arguments: argparse.Namespace) -> int:
    from mok_megatron.demo.settings import DemoSettings

    settings = DemoSettings(**{name: getattr(arguments, name) for name in arguments.options})
    from mok_megatron.demo.runner import run_demo

    return run_demo(settings)


if __name__ == "__main__":
    sys.exit(main())
