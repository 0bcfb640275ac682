"""Shapes of the routed experts that are measured: one YAML a model in ``configs/``, and a tiny one for machines without a GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from mok_megatron.bench.phases import FLOPS
from mok_megatron.config import CHANNEL_MULTIPLE, MAX_LOCAL_EXPERTS, MAX_TOPK, MoKConfig
from mok_megatron.errors import MoKArgumentError

CONFIG_FOLDER = Path(__file__).resolve().parents[2] / "configs"
_FIELDS = ("model", "hidden_size", "intermediate_size", "topk", "experts_per_gpu")


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """Experts of one GPU: H, I, K and E_local of a model, and the knobs tuned for them.

    Raises:
        MoKArgumentError: a field breaks its rule.
    """

    model: str
    hidden_size: int
    intermediate_size: int
    topk: int
    experts_per_gpu: int
    config: MoKConfig = dataclasses.field(default_factory=MoKConfig)

    def __post_init__(self) -> None:
        rules = {
            "hidden_size": (CHANNEL_MULTIPLE, None),
            "intermediate_size": (CHANNEL_MULTIPLE, None),
            "topk": (1, MAX_TOPK),
            "experts_per_gpu": (1, MAX_LOCAL_EXPERTS),
        }
        for name, (step, most) in rules.items():
            value = getattr(self, name)
            rule = f"must be a positive multiple of {step}" if step > 1 else f"must be between 1 and {most}"
            if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value % step or (most and value > most):
                raise MoKArgumentError(f"{name}={value!r} of shape {self.model!r}: {rule}")

    def flops(self, phase: str, routes: float) -> float:
        """Floating-point operations of a phase over so many routes, padding not counted."""
        return FLOPS[phase] * routes * self.hidden_size * self.intermediate_size

    @property
    def weight_elements(self) -> int:
        """Elements of w13 and w2 of all experts of a GPU."""
        return 3 * self.experts_per_gpu * self.hidden_size * self.intermediate_size


TINY = ModelShape("tiny", hidden_size=128, intermediate_size=256, topk=2, experts_per_gpu=4)


def config_names(folder: Path = CONFIG_FOLDER) -> list[str]:
    """Names of the shapes in ``folder``: its YAML files without their ending, smallest hidden size first."""
    found = {path.stem: _read(path) for path in folder.glob("*.yaml")}
    return sorted(found, key=lambda name: (found[name].get("hidden_size", 0), found[name].get("intermediate_size", 0)))


def load_shape(name: str, folder: Path = CONFIG_FOLDER) -> ModelShape:
    """The shape of that name: ``tiny``, a file of ``folder`` without its ending, or the path of a YAML file.

    Raises:
        MoKArgumentError: no such shape, or one that breaks a rule.
    """
    if name == TINY.model:
        return TINY
    path = Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join([*config_names(folder), TINY.model])
        raise MoKArgumentError(f"shapes={name!r}: must be one of {known}, or the path of a YAML file")
    values = _read(path)
    for field in _FIELDS:
        if field not in values:
            raise MoKArgumentError(f"shapes={name!r}: the file must have {field}")
    unknown = sorted(set(values) - {*_FIELDS, "mok"})
    if unknown:
        raise MoKArgumentError(f"shapes={name!r}: the file has unknown keys {unknown}, allowed are {', '.join(_FIELDS)} and mok")
    return ModelShape(**{field: values[field] for field in _FIELDS}, config=MoKConfig.from_yaml(path) if "mok" in values else MoKConfig())


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise MoKArgumentError(f"shapes={str(path)!r}: cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise MoKArgumentError(f"shapes={str(path)!r}: must hold a mapping, holds {type(values).__name__}")
    return values
