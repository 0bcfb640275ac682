"""A workspace whose calls take the way to the GPU, over a library that keeps each call's words instead of launching kernels."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mok_megatron import MoKConfig
from mok_megatron.buffers import SymmetricBuffers, WorkspaceShape
from mok_megatron.config import MAX_EP_SIZE, MAX_LOCAL_EXPERTS
from mok_megatron.device_calls import CallLog
from mok_megatron.executors import cuda
from mok_megatron.executors.cuda_backward import BACKWARD_FIELDS
from mok_megatron.workspace import MoKWorkspace

# No matrix is square.
TOKENS, TOPK, HIDDEN, INNER, EXPERTS = 24, 2, 192, 64, 4
_FIELDS = {"mok_sm90_forward": cuda._FORWARD_FIELDS, "mok_sm90_schedule": cuda._SCHEDULE_FIELDS}
_TABLES = {"mok_sm90_forward": 2, "mok_sm90_schedule": 0}


class Launch:
    """What one kernel call was given: its name, its words by name, and its tables by index."""

    def __init__(self, name: str, address: int) -> None:
        self.name = name
        fields, tables = _FIELDS.get(name, BACKWARD_FIELDS), _TABLES.get(name, 4)
        first = len(cuda._PEER_FIELDS) * MAX_EP_SIZE
        words = list((ctypes.c_int64 * (first + len(fields) + tables * MAX_LOCAL_EXPERTS)).from_address(address))
        self.words = dict(zip(fields, words[first:], strict=False))
        first += len(fields)
        self.tables = [words[first + i * MAX_LOCAL_EXPERTS : first + i * MAX_LOCAL_EXPERTS + EXPERTS] for i in range(tables)]


class StubLibrary:
    """The library's C interface; every size is small and every launch is kept."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.code = 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("mok_"):
            raise AttributeError(name)
        if not name.startswith("mok_sm90_") or name.endswith(("words", "load")):
            return lambda *_: 0 if name.endswith("load") else 64

        def launch(address: int, stream: int) -> int:
            self.launches.append(Launch(name, address))
            return self.code

        launch.__name__ = name
        return launch


@dataclasses.dataclass
class StubDevice:
    config: MoKConfig
    workspace: MoKWorkspace
    library: StubLibrary

    @property
    def last(self) -> Launch:
        return self.library.launches[-1]


def workspace_shape(ep_size: int = 1) -> WorkspaceShape:
    return WorkspaceShape(ep_size, TOKENS, HIDDEN, TOPK, EXPERTS, INNER, torch.bfloat16)


def host_workspace(ep_size: int = 1) -> MoKWorkspace:
    """Of this process alone, in nobody's cache."""
    shape = workspace_shape(ep_size)
    buffers = [SymmetricBuffers.from_memory(shape, torch.zeros(SymmetricBuffers.num_bytes(shape), dtype=torch.uint8)) for _ in range(ep_size)]
    return MoKWorkspace(shape, 0, buffers, device=torch.device("cpu"))


def stub_device(monkeypatch: pytest.MonkeyPatch, ep_size: int = 1) -> StubDevice:
    """A workspace in the CPU's memory with a CudaExecutor over a StubLibrary."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *sizes, pin_memory=False, **options: zeros(*sizes, **options))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)  # the index of the CPU's device
    workspace, library = host_workspace(ep_size), StubLibrary()
    shape, rows = workspace.shape, workspace.macrobatch_size
    workspace.call_log = CallLog()
    workspace.executor = cuda.CudaExecutor(
        cuda.ExecutorShape(0, ep_size, TOKENS, TOPK, HIDDEN, INNER, EXPERTS, workspace.minibatch_size, rows, shape.capacity_rows),
        [
            cuda.RankMemory(b.x, b.router_weights, b.combine, b.flags.words, b.topk_experts, b.num_tokens, b.dy, b.d_router_weights)
            for b in workspace.buffers
        ],
        torch.empty(rows, HIDDEN, dtype=torch.bfloat16),
        torch.empty(rows, INNER, dtype=torch.bfloat16),
        torch.empty(rows),
        library,  # type: ignore[arg-type]
    )
    return StubDevice(MoKConfig(), workspace, library)
