"""Stock Megatron-Core without CUDA: what :mod:`mok_megatron.stock_cpu` switches on, and that only demo and tests do."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from mok_megatron import MoKUnsupportedError, stock_cpu
from tests.cli.conftest import ROOT
from tests.distributed import RankPool


def test_refuses_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(stock_cpu, "_enabled", None)
    stream = torch.cuda.Stream
    with pytest.raises(MoKUnsupportedError, match=r"is_available\(\) is True.*CUDA_VISIBLE_DEVICES"):
        stock_cpu.enable_stock_cpu()
    assert torch.cuda.Stream is stream and not stock_cpu.is_enabled()


def test_nothing_but_the_demo_imports_it() -> None:
    users = set()
    for path in (ROOT / "mok_megatron").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if any("stock_cpu" in name for name in (*names, module)):
                users.add(path.relative_to(ROOT / "mok_megatron").parts[0])
    assert users == {"demo"}


def test_says_that_megatron_is_missing() -> None:
    code = """
import sys
sys.modules["megatron"] = None
from mok_megatron.stock_cpu import enable_stock_cpu
enable_stock_cpu()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 1 and "enable_stock_cpu() needs Megatron-Core" in done.stderr


def losses(rank: int, dispatcher: str, recompute: str) -> list[float]:
    """Losses of four steps of the demo's fp32 model on this rank's part of the data; ``recompute``: '', 'full' or 'moe'."""
    import torch.distributed as dist

    stock_cpu.enable_stock_cpu()
    stock_cpu.enable_stock_cpu()  # a second call changes nothing
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from mok_megatron.demo import model as demo_model
    from mok_megatron.demo.settings import DemoSettings

    settings = DemoSettings(steps=4, ranks=dist.get_world_size(), dtype="fp32", hidden_size=64, ffn_hidden_size=64, topk=2)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=settings.ranks)
    torch.manual_seed(0)
    model = demo_model.build_model(settings, dispatcher, "cpu")
    optimizer = demo_model.build_optimizer(settings, model)
    model.config.finalize_model_grads_func = finalize_model_grads
    model.config.no_sync_func = model.no_sync
    model.config.grad_scale_func = optimizer.scale_loss
    if recompute == "full":
        model.config.recompute_granularity, model.config.recompute_method, model.config.recompute_num_layers = "full", "uniform", 1
    for layer in demo_model.moe_layers(model) if recompute == "moe" else ():
        layer.moe_layer_recompute = True
    batches = demo_model.batches(settings, "cpu")
    seen = []
    for _ in range(settings.steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        outputs = get_forward_backward_func()(
            forward_step_func=demo_model.forward_step, data_iterator=batches, model=[model],
            num_microbatches=settings.num_microbatches, seq_length=settings.seq_length,
            micro_batch_size=settings.micro_batch_size, forward_only=False,
        )  # fmt: skip
        optimizer.step()
        seen += [output["loss"].item() for output in outputs]
    return seen


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Two ranks of their own: enable_stock_cpu() is for the rest of a process, and other tests must not meet it."""
    ranks = RankPool(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def alltoall(pool: RankPool) -> list[list[float]]:
    return pool.run(losses, "alltoall", "")


def test_a_gpt_model_trains_at_ep_2(alltoall: list[list[float]]) -> None:
    for own in alltoall:
        assert len(own) == 8 and own[-1] < own[0] - 0.1
    assert alltoall[0] != alltoall[1]  # each rank has its own part of the data


@pytest.mark.parametrize(("dispatcher", "recompute"), [("allgather", ""), ("alltoall", "full"), ("alltoall", "moe")])
def test_dispatchers_and_recomputation_agree(pool: RankPool, alltoall: list[list[float]], dispatcher: str, recompute: str) -> None:
    for own, expected in zip(pool.run(losses, dispatcher, recompute), alltoall, strict=True):
        # Two routes a token: the sum of two terms has one order only, so the dispatchers agree to fp32 rounding.
        assert own == pytest.approx(expected, rel=1e-5)
