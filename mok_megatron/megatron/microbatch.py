"""Which microbatch a pass belongs to, for error messages.

Megatron's schedules say which microbatch is in its forward pass (``set_current_microbatch``); programs with a loop of their own call
:func:`set_microbatch`. A forward that is run again for its activations happens while the schedule is elsewhere: a layer remembers, in
order, the microbatches of the forward passes it has run without saving anything.
"""

from __future__ import annotations

import importlib
from collections import deque
from typing import Any

from mok_megatron.megatron import compat

_current: int | None = None


def set_microbatch(index: int | None) -> None:
    """The microbatch (0-based) whose forward pass comes next; error messages name it. None: not known."""
    global _current
    _current = index


def current_microbatch() -> int | None:
    """The microbatch in its forward pass, None where nobody said."""
    return _current


def follow_schedules() -> None:
    """Learns the microbatch from Megatron's pipeline schedules."""

    def make(original: Any) -> Any:
        def set_current_microbatch(model: Any, microbatch_id: int) -> Any:
            set_microbatch(microbatch_id)
            return original(model, microbatch_id)

        return set_current_microbatch

    schedules = importlib.import_module("megatron.core.pipeline_parallel.schedules")
    compat.wrap(schedules, "set_current_microbatch", make)


class MicrobatchMemory:
    """Microbatch numbers of one layer's forward passes, those run again included.

    Backward passes come in the order of the forward passes (1F1B and its variants, per model chunk), so what is run again is
    the oldest pass not yet run again.
    """

    _LIMIT = 4096  # a program that runs training-mode forwards without backward must not make this grow

    def __init__(self) -> None:
        self._not_saved: deque[int | None] = deque(maxlen=self._LIMIT)

    def of_forward(self, *, training: bool, saves: bool, in_backward: bool) -> int | None:
        """The microbatch of a forward pass that starts now."""
        if in_backward and saves and self._not_saved:
            return self._not_saved.popleft()
        if training and not saves:
            self._not_saved.append(_current)
        return _current
