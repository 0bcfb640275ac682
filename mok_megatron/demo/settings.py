"""What the demo can be asked for, checked before anything starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mok_megatron.config import CHANNEL_MULTIPLE, INTEGER_LIMIT, LONGEST_TIMEOUT_SECONDS, MAX_EP_SIZE, MAX_LOCAL_EXPERTS, MAX_TOPK
from mok_megatron.errors import MoKArgumentError

_MOST = INTEGER_LIMIT - 1
_LIMITS = {
    "steps": (1, _MOST),
    "ranks": (1, MAX_EP_SIZE),
    "seed": (0, _MOST),
    "num_layers": (1, _MOST),
    "num_experts": (1, MAX_EP_SIZE * MAX_LOCAL_EXPERTS),
    "topk": (1, MAX_TOPK),
    "hidden_size": (CHANNEL_MULTIPLE, _MOST),
    "ffn_hidden_size": (CHANNEL_MULTIPLE, _MOST),
    "seq_length": (2, _MOST),
    "micro_batch_size": (1, _MOST),
    "num_microbatches": (1, _MOST),
}
"""The least and the most that each of the whole-number fields may be, whatever the others are."""


@dataclasses.dataclass(frozen=True)
class DemoSettings:
    """A demo run. Each field is a ``mok-megatron demo`` option of the same name unless marked fixed.

    All that MoK itself would refuse is refused here, so that no process is started for it. ``out`` is not looked at:
    :func:`mok_megatron.demo.report.prepare` makes it and proves that it can be written.

    Raises:
        MoKArgumentError: on construction, naming the argument, its value and the rule it breaks.
    """

    out: Path = Path("mok-demo")
    steps: int = 50
    ranks: int = 2
    seed: int = 1234
    dtype: str = "bf16"
    num_layers: int = 2
    num_experts: int = 8
    topk: int = 4
    hidden_size: int = 128
    ffn_hidden_size: int = 128
    seq_length: int = 64
    micro_batch_size: int = 2
    num_microbatches: int = 2
    timeout_seconds: float = 900.0
    # Fixed: the mock data counts upwards, which a vocabulary of this size learns within 50 steps at this rate.
    vocab_size: int = 256
    learning_rate: float = 2e-3

    def __post_init__(self) -> None:
        for name, (least, most) in _LIMITS.items():
            value = getattr(self, name)
            self._require(name, isinstance(value, int) and not isinstance(value, bool), "a whole number")
            self._require(name, least <= value <= most, f"between {least} and {most}")
        self._require("dtype", self.dtype in ("bf16", "fp32"), "bf16 or fp32")
        for name in ("hidden_size", "ffn_hidden_size"):
            self._require(name, getattr(self, name) % CHANNEL_MULTIPLE == 0, f"a multiple of {CHANNEL_MULTIPLE}")
        self._require(
            "num_experts", self.num_experts % self.ranks == 0,
            f"a multiple of --ranks ({self.ranks}): every rank holds the same number of experts",
        )  # fmt: skip
        most = MAX_LOCAL_EXPERTS * self.ranks
        self._require("num_experts", self.num_experts <= most, f"at most {most}: {MAX_LOCAL_EXPERTS} on each of --ranks ({self.ranks})")
        self._require("topk", self.topk <= self.num_experts, f"at most --num-experts ({self.num_experts})")
        most = _MOST // (self.seq_length * self.topk)
        self._require(
            "micro_batch_size", self.micro_batch_size <= most,
            f"at most {most} with --seq-length {self.seq_length} and --topk {self.topk}: a microbatch has fewer than 2^31 routes",
        )  # fmt: skip
        most = _MOST // (self.ranks * self.num_microbatches * self.micro_batch_size)
        self._require(
            "steps", self.steps <= most,
            f"at most {most} with --ranks {self.ranks}, --num-microbatches {self.num_microbatches} and --micro-batch-size "
            f"{self.micro_batch_size}: a run has fewer than 2^31 samples",
        )  # fmt: skip
        self._require(
            "timeout_seconds", 0 < self.timeout_seconds <= LONGEST_TIMEOUT_SECONDS,
            f"greater than 0 and at most {LONGEST_TIMEOUT_SECONDS} (a week)",
        )  # fmt: skip

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise MoKArgumentError(f"--{name.replace('_', '-')}: {getattr(self, name)} is not allowed; must be {rule}")

    def to_dict(self) -> dict[str, object]:
        return {**dataclasses.asdict(self), "out": str(self.out)}
