"""What a caller has set for torch changes nothing: not a bit of the results, and not whether the workspace lives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch

from mok_megatron import functional
from tests.cpu.problems import OUTPUTS, Batch, Run, random_batch, workspace_for


def _step(batch: Batch, run: Run, *, backward: bool = True) -> dict[str, torch.Tensor]:
    config, workspace = workspace_for(batch, run, None)
    schedule = functional.build_schedule(workspace, config, batch.topk_experts)
    operands = (batch.x, batch.router_weights, batch.w13, batch.w2)
    y, context = functional.forward(config, workspace, schedule, *operands, save_context=backward)
    if not backward:
        return {"y": y}
    gradients = functional.backward(config, workspace, schedule, context, batch.dy, *operands)
    return dict(zip(OUTPUTS, (y, *gradients), strict=True))


@contextmanager
def _setting(set_value, get_value, value: object) -> Iterator[None]:
    before = get_value()
    set_value(value)
    try:
        yield
    finally:
        set_value(before)


def _ambient(name: str) -> AbstractContextManager[object]:
    return {
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "default dtype": lambda: _setting(torch.set_default_dtype, torch.get_default_dtype, torch.float64),
        "matmul precision": lambda: _setting(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision, "medium"),
        "default device": lambda: _setting(torch.set_default_device, torch.get_default_device, "meta"),
        "threads": lambda: _setting(torch.set_num_threads, torch.get_num_threads, 2),
        "grad mode": torch.enable_grad,
    }[name]()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["autocast", "default dtype", "matmul precision", "default device", "threads", "grad mode"])
def test_results_do_not_depend_on(name: str, dtype: torch.dtype, seed: int) -> None:
    batch, run = random_batch(seed, 200, hidden=128, dtype=dtype), Run((200,))
    plain = _step(batch, run)
    functional.clear_workspaces()  # made anew under the setting, too
    with _ambient(name):
        got = _step(batch, run)
    for output in OUTPUTS:
        assert torch.equal(got[output], plain[output]), output


def test_a_workspace_made_under_inference_mode_trains_afterwards(seed: int) -> None:
    batch, run = random_batch(seed, 50), Run((50,))
    functional.clear_workspaces()
    with torch.inference_mode():
        evaluated = _step(batch, run, backward=False)["y"].clone()
    trained = _step(batch, run)
    assert torch.equal(trained["y"], evaluated)
