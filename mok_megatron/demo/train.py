"""One process of the demo: trains the model once per :class:`Run`, all runs from the same weights on the same batches.

Importing this module imports Megatron-Core (seconds), so only the training processes do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mok_megatron.demo.settings import DemoSettings

RESULTS_NAME = "runs.json"
_COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=3)


@dataclasses.dataclass(frozen=True)
class Run:
    """One training of the model.

    Attributes:
        name: key in the report.
        backend: ``--moe-backend`` of this run.
        dispatcher: Megatron's ``moe_token_dispatcher_type``.
        moved_by_one_ulp: whether the input embedding starts one unit in the last place away.
    """

    name: str
    backend: str
    dispatcher: str
    moved_by_one_ulp: bool = False


RUNS = (
    Run("alltoall", backend="megatron", dispatcher="alltoall"),
    Run("allgather", backend="megatron", dispatcher="allgather"),
    Run("alltoall_one_ulp", backend="megatron", dispatcher="alltoall", moved_by_one_ulp=True),
    Run("mok", backend="mok", dispatcher="alltoall"),
)


def train_rank(rank: int, settings: DemoSettings, device: str, scratch: str) -> None:
    """Entry point of one training process; rank 0 leaves the runs' results in ``scratch/runs.json``.

    Args:
        rank: this process, 0 <= rank < settings.ranks.
        settings: what to train.
        device: ``cuda`` (GPU number ``rank``) or ``cpu``.
        scratch: a folder all ranks see, empty at the start.
    """
    warnings.simplefilter("ignore")  # Megatron's notices about the absence of Transformer Engine and APEX
    for name in ("megatron", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.ranks))
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{scratch}/rendezvous",
        rank=rank,
        world_size=settings.ranks,
        timeout=_COLLECTIVE_TIMEOUT,
    )
    from megatron.core import parallel_state, tensor_parallel

    if device == "cpu":
        from mok_megatron.stock_cpu import enable_stock_cpu

        enable_stock_cpu()
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=settings.ranks,
        distributed_timeout_minutes=int(_COLLECTIVE_TIMEOUT.total_seconds()) // 60,
    )
    if device == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(settings.seed)
    with _progress(settings, rank) as bar:
        results = {run.name: _train(run, settings, device, bar) for run in RUNS}
    if rank == 0:
        Path(scratch, RESULTS_NAME).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


@contextlib.contextmanager
def _progress(settings: DemoSettings, rank: int) -> Iterator[Any]:
    from tqdm import tqdm

    # Into a file or a pipe a bar is one more line at each refresh: refresh it seldom there.
    interval = 0.1 if sys.stderr.isatty() else 5.0
    with tqdm(total=settings.steps * len(RUNS), disable=rank != 0, mininterval=interval, unit="step") as bar:
        yield bar


def _train(run: Run, settings: DemoSettings, device: str, bar: Any) -> dict[str, Any]:
    """Trains once. Returns the losses (mean over ranks) of every step and what was seen on the way."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from mok_megatron.demo import model as demo_model
    from mok_megatron.megatron import apply_mok_to_megatron

    torch.manual_seed(settings.seed)
    apply_mok_to_megatron(backend=run.backend)
    model = demo_model.build_model(settings, run.dispatcher, device)
    if run.moved_by_one_ulp:
        demo_model.move_inputs_by_one_ulp(model, settings.seed)
    optimizer = demo_model.build_optimizer(settings, model)
    model.config.finalize_model_grads_func = finalize_model_grads
    model.config.no_sync_func = model.no_sync
    model.config.grad_scale_func = optimizer.scale_loss
    layers = demo_model.moe_layers(model)
    counts = [_count_tokens(layer, settings.num_experts) for layer in layers]
    batches = demo_model.batches(settings, device)
    forward_backward = get_forward_backward_func()

    bar.set_description(run.name)
    losses, norms, seconds = [], [], []
    for _ in range(settings.steps):
        started = time.perf_counter()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        outputs = forward_backward(
            forward_step_func=demo_model.forward_step,
            data_iterator=batches,
            model=[model],
            num_microbatches=settings.num_microbatches,
            seq_length=settings.seq_length,
            micro_batch_size=settings.micro_batch_size,
            forward_only=False,
        )
        _, norm, _ = optimizer.step()
        loss = torch.stack([output["loss"] for output in outputs]).double().mean()
        dist.all_reduce(loss)
        losses.append(loss.item() / settings.ranks)
        norms.append(float(norm))
        seconds.append(time.perf_counter() - started)  # a GPU is done once its numbers are here
        bar.set_postfix(loss=f"{losses[-1]:.4f}", refresh=False)
        bar.update()
    for count in counts:
        dist.all_reduce(count)
    return {
        **dataclasses.asdict(run),
        "layers": [describe_layer(layer) for layer in layers],
        "losses": losses,
        "gradient_norms": norms,
        "seconds_per_step": seconds,
        "tokens_per_expert": [count.tolist() for count in counts],
    }


def _count_tokens(layer: Any, num_experts: int) -> torch.Tensor:
    """Counts the routes the layer's router makes, int64 [E], over all the forwards to come."""
    count = torch.zeros(num_experts, dtype=torch.int64, device=layer.router.weight.device)

    def add(router: torch.nn.Module, args: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        routing_map = output[1]  # bool [T, E]
        count.add_(routing_map.sum(0))

    layer.router.register_forward_hook(add)
    return count


def describe_layer(layer: Any) -> dict[str, Any]:
    """What the layer object itself says about who computes it: its class and its dispatcher's, not the flag."""
    from mok_megatron.megatron.layer import MoKMoELayer

    return {
        "number": layer.layer_number,
        "class": type(layer).__name__,
        "dispatcher": type(layer.token_dispatcher).__name__,
        "is_mok": isinstance(layer, MoKMoELayer),
    }
