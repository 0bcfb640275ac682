"""Where the demo runs, and the reason it gives."""

from __future__ import annotations

import pytest
import torch

from mok_megatron.demo.runner import choose_device
from mok_megatron.demo.settings import DemoSettings


def pretend(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int], archs: tuple[str, ...] = ("90a",)) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr("mok_megatron.build.build_info", lambda: {"archs": list(archs)})


def test_gpus_are_used_where_there_is_one_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (9, 0), (9, 0), (8, 0))
    assert choose_device(DemoSettings()) == ("cuda", "2 x a GPU")


@pytest.mark.parametrize(
    ("capabilities", "archs", "changes", "words"),
    [
        ((), ("90a",), {}, "no NVIDIA GPU found"),
        (((9, 0),), ("90a",), {}, "--ranks 2"),
        (((9, 0), (8, 0)), ("90a",), {}, "compute capability 8.0"),
        (((9, 0), (9, 0)), (), {}, "host part only"),
        (((9, 0), (9, 0)), ("90a",), {"dtype": "fp32"}, "--dtype fp32"),
    ],
)
def test_else_the_cpu_executor(
    monkeypatch: pytest.MonkeyPatch, capabilities: tuple[tuple[int, int], ...], archs: tuple[str, ...], changes: dict[str, str], words: str
) -> None:
    pretend(monkeypatch, *capabilities, archs=archs)
    device, reason = choose_device(DemoSettings(**changes))
    assert device == "cpu" and words in reason
