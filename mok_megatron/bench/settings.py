"""What a run of the benchmark is asked for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mok_megatron.bench.phases import PHASES, check_phase
from mok_megatron.bench.rows import COMPETITORS, DEFAULT_ROWS
from mok_megatron.bench.shapes import CONFIG_FOLDER, TINY, ModelShape, config_names, load_shape
from mok_megatron.bench.workloads import check_workload
from mok_megatron.config import MoKConfig
from mok_megatron.errors import MoKArgumentError

EP_SIZES = (1, 2, 4, 8)
# A rank that does not come must not hold a whole measurement up for the five minutes that suit training.
_TIMEOUT_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class BenchSettings:
    """Options of ``bench layer``; the empty tuples stand for what suits the device.

    Raises:
        MoKArgumentError: an option breaks its rule.
    """

    device: str = "cuda"
    ep: int = 1
    shapes: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    workload: tuple[str, ...] = ("uniform",)
    rows: tuple[str, ...] = DEFAULT_ROWS
    phases: tuple[str, ...] = PHASES
    iterations: int = 20
    warmup: int = 3
    seed: int = 1
    out: Path = Path("bench_out")
    knobs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.device not in ("cuda", "cpu"):
            raise MoKArgumentError(f"device={self.device!r}: must be cuda or cpu")
        if self.ep not in EP_SIZES:
            raise MoKArgumentError(f"ep={self.ep}: must be one of {', '.join(map(str, EP_SIZES))}")
        for name in self.workload:
            check_workload(name)
        for name in self.rows:
            if name not in COMPETITORS:
                raise MoKArgumentError(f"rows={name!r}: must be one of {', '.join(COMPETITORS)}")
        for name in self.phases:
            check_phase(name)
        for name in ("iterations", "seed", "warmup"):
            least = 1 if name == "iterations" else 0
            if getattr(self, name) < least:
                raise MoKArgumentError(f"{name}={getattr(self, name)}: must be at least {least}")
        for tokens in self.tokens:
            if tokens < 1:
                raise MoKArgumentError(f"tokens={tokens}: must be at least 1")
        if self.out.exists() and not self.out.is_dir():
            raise MoKArgumentError(f"out={str(self.out)!r}: must be a folder")
        self.model_shapes()  # reports a shape or a knob that breaks a rule before any process starts

    def model_shapes(self) -> list[ModelShape]:
        """The shapes with their tuned knobs, those of ``knobs`` on top."""
        names = self.shapes or ((TINY.model,) if self.device == "cpu" else tuple(config_names()))
        if not names:
            raise MoKArgumentError(f"shapes=(): must be given, since there are no shapes in {str(CONFIG_FOLDER)!r}")
        changes = dict(_knob(text) for text in self.knobs)
        return [_with_knobs(load_shape(name), changes) for name in names]

    def token_counts(self) -> tuple[int, ...]:
        return self.tokens or ((96,) if self.device == "cpu" else (4096,))


def _knob(text: str) -> tuple[str, object]:
    import yaml

    name, equals, value = text.partition("=")
    if not equals or not name:
        raise MoKArgumentError(f"knob={text!r}: must be NAME=VALUE")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise MoKArgumentError(f"knob={text!r}: the value must be a number or null") from error


def _with_knobs(shape: ModelShape, changes: dict[str, object]) -> ModelShape:
    default = MoKConfig()
    tuned = {name: value for name, value in shape.config.to_dict().items() if value != getattr(default, name)}
    return dataclasses.replace(shape, config=MoKConfig.from_mapping({"timeout_seconds": _TIMEOUT_SECONDS, **tuned, **changes}))
