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
INTEGER_LIMIT = 2**31
"""Row numbers and counts are 32-bit in the kernels."""
LONGEST_TIMEOUT_SECONDS = 7 * 24 * 3600


def _check_int(name: str, value: Any, low: int, multiple: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise MoKArgumentError(f"{name}={value!r}: must be an integer")
    if value < low or value % multiple:
        rule = f"must be >= {low}" + (f" and a multiple of {multiple}" if multiple > 1 else "")
        raise MoKArgumentError(f"{name}={value}: {rule}")
    if value >= INTEGER_LIMIT:
        raise MoKArgumentError(f"{name}={value}: must be below 2^31")


def _check_number(name: str, value: Any) -> None:
    # Compared, not converted: an integer can be too large for a float.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -math.inf < value < math.inf:
        raise MoKArgumentError(f"{name}={value!r}: must be a finite number")


def _read_yaml(path: str | Path) -> Any:
    """What a YAML file holds.

    Raises:
        MoKArgumentError: there is no such file, it is not YAML in UTF-8, or a key stands twice in one mapping.
    """
    import yaml

    try:
        loader = yaml.SafeLoader(Path(path).read_text(encoding="utf-8"))
        try:
            document = loader.get_single_node()
            _refuse_repeated_keys(document)
            return None if document is None else loader.construct_document(document)
        finally:
            loader.dispose()
    # ValueError: text that is not UTF-8, or a scalar such as a date that does not exist.
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise MoKArgumentError(f"mok config {str(path)!r}: cannot be read: {error}") from error


def _refuse_repeated_keys(document: Any) -> None:
    """YAML's own loader takes the last of two values of one key and says nothing."""
    import yaml

    waiting, seen = [document], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen or not isinstance(node, yaml.CollectionNode):
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
            continue
        keys = set()
        for key, value in node.value:
            waiting.append(value)
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (key.tag, key.value) in keys:
                raise ValueError(f"line {key.start_mark.line + 1}: the key {key.value!r} is given twice")
            keys.add((key.tag, key.value))


@dataclasses.dataclass(frozen=True)
class MoKConfig:
    """Knobs, each optional. Results do not depend on any of them by a single bit.

    fwd_num_comm_sms, bwd_num_comm_sms: SMs that only move rows; 0 = communication warps in every CTA; None = 0, the fastest measured.
    minibatch_size: rows of one overlap step, a multiple of 128. None: a third of the two-wave rule's rows, 2 * SMs * 128 * 256 / min(2I, H),
        rounded up to 2048: the second GEMM trails the first by three minibatches.
    macrobatch_size: rows of the ring, a multiple of the minibatch. None: num_local_tokens * K and a quarter more, plus the experts' padding.
    schedule_capacity_multiplier: the largest share of all the group's routes that one rank may receive, in (0, 1]; 1 cannot overflow.
    sm_reserve: SMs that a pass leaves to other streams.
    timeout_seconds: how long a rank waits for a peer before it raises; at most a week.

    Integers are below 2^31.

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
        if self.minibatch_size is not None and self.macrobatch_size is not None and self.macrobatch_size % self.minibatch_size:
            raise MoKArgumentError(f"macrobatch_size={self.macrobatch_size}: must be a multiple of minibatch_size={self.minibatch_size}")
        _check_number("schedule_capacity_multiplier", self.schedule_capacity_multiplier)
        if not 0 < self.schedule_capacity_multiplier <= 1:
            raise MoKArgumentError(f"schedule_capacity_multiplier={self.schedule_capacity_multiplier}: must be in (0, 1]")
        _check_number("timeout_seconds", self.timeout_seconds)
        if not 0 < self.timeout_seconds <= LONGEST_TIMEOUT_SECONDS:
            raise MoKArgumentError(f"timeout_seconds={self.timeout_seconds}: must be positive and at most {LONGEST_TIMEOUT_SECONDS} (a week)")

    def check_sms(self, num_sms: int) -> None:
        """Refuse what leaves a pass no SMs for its products on a GPU of ``num_sms``.

        Raises:
            MoKArgumentError: sm_reserve and fwd_num_comm_sms leave none, or bwd_num_comm_sms asks for SMs that only move rows.
        """
        if self.bwd_num_comm_sms:
            raise MoKArgumentError(
                f"bwd_num_comm_sms={self.bwd_num_comm_sms}: must be 0 or None: on GPUs, warps of every SM move the rows of a backward pass"
            )
        # Blocks of the kernels come in clusters of two.
        moving = -(-(self.fwd_num_comm_sms or 0) // 2) * 2
        if moving >= (num_sms - self.sm_reserve) // 2 * 2:
            raise MoKArgumentError(
                f"fwd_num_comm_sms={self.fwd_num_comm_sms}, sm_reserve={self.sm_reserve}: must leave a pair of the GPU's {num_sms} SMs"
            )

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

        A file with a section may have other keys beside it, such as a model's shape, but no knob. An empty file or section is the default.

        Raises:
            MoKArgumentError: a file that cannot be read, is not a mapping or has a key twice, or a knob that breaks its rule.
        """
        values = _read_yaml(path)
        values, place = ({} if values is None else values), f"mok config {str(path)!r}"
        if isinstance(values, Mapping) and "mok" in values:
            for field in dataclasses.fields(cls):
                if field.name in values:
                    raise MoKArgumentError(f"{place}: {field.name}={values[field.name]!r} stands beside the section mok; it must stand in it")
            values, place = ({} if values["mok"] is None else values["mok"]), f"{place}, section mok"
        if not isinstance(values, Mapping):
            raise MoKArgumentError(f"{place}: must hold a mapping of knobs, holds {values!r}")
        return cls.from_mapping(values)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
