"""Runs a Megatron training script through MoK's launcher and writes every logged step's loss with all its bits.

    torchrun ... scripts/loss_log.py LOSSES.txt [--move-init=SEED] SCRIPT ARGUMENTS

A line a step: iteration, loss, the loss in hexadecimal, gradient norm. ``--move-init`` first moves every element of the input embedding by one
unit in the last place, up or down by random numbers of that seed: how far a run gets from itself by rounding alone. Megatron's own log has
seven digits.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from pathlib import Path
from typing import Any

import torch

from mok_megatron import launch


def main() -> None:
    target, *rest = sys.argv[1:] or [""]
    option, _, seed = rest[0].partition("=") if rest else ("", "", "")
    move = option == "--move-init"
    argv = rest[1:] if move else rest
    if not argv:
        raise SystemExit(__doc__)
    if move and not seed.isdecimal():
        raise SystemExit(f"loss_log.py: --move-init is '{seed}'; it must be the seed of a random generator, a whole number from 0 on")
    sys.path[0] = os.path.dirname(os.path.realpath(argv[0]))  # Megatron itself may lie beside the script
    if move:
        _move_embeddings(int(seed))
    _write_losses(Path(target))
    launch.main(argv)


def _move_embeddings(seed: int) -> None:
    layers = importlib.import_module("megatron.core.tensor_parallel.layers")
    build = layers.VocabParallelEmbedding.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        bits = self.weight.data.view({2: torch.int16, 4: torch.int32}[self.weight.element_size()])
        step = torch.randint(0, 2, bits.shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
        bits += torch.where(self.weight.data == 0, 0, step.to(bits.device)).to(bits.dtype)

    layers.VocabParallelEmbedding.__init__ = init


def _write_losses(target: Path) -> None:
    training = importlib.import_module("megatron.training.training")
    original = training.training_log
    signature = inspect.signature(original)
    writes = int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1  # the last stage has the loss
    if writes:
        target.write_text("")

    @functools.wraps(original)
    def log(*args: Any, **kwargs: Any) -> Any:
        values = signature.bind(*args, **kwargs).arguments
        losses = values["loss_dict"]
        if writes and "lm loss" in losses:
            loss = losses["lm loss"]
            number = float(loss[0] / loss[1] if isinstance(loss, torch.Tensor) and loss.numel() == 2 else loss)
            with target.open("a") as file:
                print(values["iteration"], repr(number), number.hex(), values.get("grad_norm"), file=file)
        return original(*args, **kwargs)

    training.training_log = log


if __name__ == "__main__":
    main()
