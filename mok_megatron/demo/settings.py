"""What the demo can be asked for, checked before anything starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mok_megatron.errors import MoKArgumentError


@dataclasses.dataclass(frozen=True)
class DemoSettings:
    """A demo run. Each field is a ``mok-megatron demo`` option of the same name unless marked fixed.

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
        for name in ("steps", "num_layers", "topk", "micro_batch_size", "num_microbatches"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        self._require("ranks", 1 <= self.ranks <= 8, "between 1 and 8 (one process each; it is also the EP size)")
        self._require("seed", 0 <= self.seed < 2**31, "between 0 and 2147483647")
        self._require("dtype", self.dtype in ("bf16", "fp32"), "bf16 or fp32")
        for name in ("hidden_size", "ffn_hidden_size"):
            value = getattr(self, name)
            self._require(name, value >= 64 and value % 64 == 0, "a positive multiple of 64")
        self._require("seq_length", self.seq_length >= 2, "at least 2")
        self._require(
            "num_experts", self.num_experts >= 1 and self.num_experts % self.ranks == 0,
            f"a positive multiple of --ranks ({self.ranks}): every rank holds the same number of experts",
        )  # fmt: skip
        self._require("topk", self.topk <= self.num_experts, f"at most --num-experts ({self.num_experts})")
        self._require("topk", self.topk <= 32, "at most 32")
        self._require("timeout_seconds", self.timeout_seconds > 0, "greater than 0")
        self._require("out", not self.out.exists() or self.out.is_dir(), "a folder, or a path that does not exist yet")

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise MoKArgumentError(f"--{name.replace('_', '-')}: {getattr(self, name)} is not allowed; must be {rule}")

    def to_dict(self) -> dict[str, object]:
        return {**dataclasses.asdict(self), "out": str(self.out)}
