"""The phases of a layer that are timed, by the names that options, tables and JSON use."""

from __future__ import annotations

from mok_megatron.errors import MoKArgumentError

FORWARD = "forward"
FORWARD_BACKWARD = "forward+backward"
BACKWARD = "backward"
PHASES = (FORWARD, FORWARD_BACKWARD, BACKWARD)
# Floating-point operations of a route in units of H I: one expert's w13 and w2 once forward, and twice backward.
FLOPS = {FORWARD: 6.0, FORWARD_BACKWARD: 18.0, BACKWARD: 12.0}


def check_phase(name: str) -> None:
    """Raises MoKArgumentError for an unknown name."""
    if name not in PHASES:
        raise MoKArgumentError(f"phases={name!r}: must be one of {', '.join(PHASES)}")
