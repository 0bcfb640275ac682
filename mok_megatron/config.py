"""Tuning knobs of the backend."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mok_megatron.errors import MoKArgumentError

BLOCK_ROWS = 128
MAX_TOPK = 32
MAX_EP_SIZE = 8
MAX_LOCAL_EXPERTS = 256
CHANNEL_MULTIPLE = 64


def _check_int(name: str, value: Any, low: int, multiple: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise MoKArgumentError(f"{name}={value!r}: must be an integer")
    if value < low or value % multiple:
        rule = f"must be >= {low}" + (f" and a multiple of {multiple}" if multiple > 1 else "")
        raise MoKArgumentError(f"{name}={value}: {rule}")


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise MoKArgumentError(f"{name}={value!r}: must be a finite number")


@dataclasses.dataclass(frozen=True)
class MoKConfig:
    """Knobs, each optional. Results do not depend on any of them by a single bit.

    fwd_num_comm_sms, bwd_num_comm_sms: SMs that only move rows; 0 = communication warps in every CTA; None = the tuned default.
    minibatch_size: rows of one overlap step, a multiple of 128. None: the two-wave rule 2 * SMs * 128 * 256 / min(2I, H), rounded up to 128.
    macrobatch_size: rows of the ring, a multiple of the minibatch. None: num_local_tokens * K and a quarter more, plus the experts' padding.
    schedule_capacity_multiplier: the largest share of all the group's routes that one rank may receive, in (0, 1]; 1 cannot overflow.
    sm_reserve: SMs that a pass leaves to other streams.
    timeout_seconds: how long a rank waits for a peer before it raises.

    Raises:
        MoKArgumentError: a knob breaks its rule.
    """

    fwd_num_comm_sms: int | None = None
    bwd_num_comm_sms: int | None = None
    minibatch_size: int | None = None
    macrobatch_size: int | None = None
    schedule_capacity_multiplier: float = 1.0
    sm_reserve: int = 0
    timeout_seconds: float = 300.0

    def __post_init__(self) -> None:
        for name in ("fwd_num_comm_sms", "bwd_num_comm_sms"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0)
        _check_int("sm_reserve", self.sm_reserve, 0)
        for name in ("minibatch_size", "macrobatch_size"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), BLOCK_ROWS, BLOCK_ROWS)
        if (
            self.minibatch_size is not None
            and self.macrobatch_size is not None
            and self.macrobatch_size % self.minibatch_size
        ):
            raise MoKArgumentError(
                f"macrobatch_size={self.macrobatch_size}: must be a multiple of minibatch_size={self.minibatch_size}"
            )
        _check_number("schedule_capacity_multiplier", self.schedule_capacity_multiplier)
        if not 0 < self.schedule_capacity_multiplier <= 1:
            raise MoKArgumentError(
                f"schedule_capacity_multiplier={self.schedule_capacity_multiplier}: must be in (0, 1]"
            )
        _check_number("timeout_seconds", self.timeout_seconds)
        if self.timeout_seconds <= 0:
            raise MoKArgumentError(f"timeout_seconds={self.timeout_seconds}: must be positive")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "MoKConfig":
        """Config from a mapping of knob names; an unknown name is an error."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                raise MoKArgumentError(f"{name}={values[name]!r}: no such knob; knobs are {', '.join(known)}")
        return cls(**values)

    @classmethod
    def from_yaml(cls, path: str | Path) -> "MoKConfig":
        """Config from the `mok` section of a YAML file, or from its top level when it has no such section.

        Raises:
            MoKArgumentError: no such file, not a mapping, or a knob that breaks its rule.
        """
        import yaml

        try:
            values = yaml.safe_load(Path(path).read_text())
        except (OSError, yaml.YAMLError) as error:
            raise MoKArgumentError(f"mok config {str(path)!r}: cannot be read: {error}") from error
        values = {} if values is None else values
        if isinstance(values, Mapping) and "mok" in values:
            values = values["mok"] or {}
        if not isinstance(values, Mapping):
            raise MoKArgumentError(
                f"mok config {str(path)!r}: must hold a mapping of knobs, holds {type(values).__name__}"
            )
        return cls.from_mapping(values)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
