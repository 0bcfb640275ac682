"""Checkpoints: MoK adds nothing, and experts keep their numbers and moments whatever the EP size (D-T1 to D-T3)."""

from __future__ import annotations

import multiprocessing
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from tests.distributed import RankPool
from tests.megatron import helpers
from tests.megatron.helpers import build_layer, make_config, start_megatron, tokens

PREFIX = "decoder.layers.0.mlp."


class Model(torch.nn.Module):
    """One MoE layer under the name that a GPT model gives it."""

    def __init__(self, backend: str, ep_size: int) -> None:
        super().__init__()
        self.mlp = build_layer(backend, make_config(ep_size))
        self.config = self.mlp.config

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None) -> Any:
        return self.mlp.sharded_state_dict(f"{prefix}{PREFIX}", sharded_offsets, metadata)


def build(backend: str, ep_size: int) -> tuple[Model, Any]:
    """A model under DDP and its optimizer, after one step."""
    start_megatron(ep_size)
    model = Model(backend, ep_size)
    config = OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=False)
    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False), model)
    optimizer = get_megatron_optimizer(config, [ddp])
    # One step makes the optimizer's state.
    ddp.zero_grad_buffer()
    model.mlp(tokens((16, 1, 64), 1).requires_grad_(True))[0].sum().backward()
    ddp.finish_grad_sync()
    optimizer.step()
    return model, optimizer


def moments_of(model: Model, optimizer: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Adam's state by parameter name."""
    states: dict[Any, Any] = {}
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        states |= dict(part.optimizer.state)
    return {name: states[parameter] for name, parameter in model.mlp.named_parameters()}


def experts_of(model: Model, optimizer: Any) -> dict[tuple[int, str], tuple[torch.Tensor, ...]]:
    """Weight, first and second moment by (global expert number, fc1 or fc2)."""
    moments = moments_of(model, optimizer)
    found = {}
    for name, parameter in model.mlp.named_parameters():
        if ".local_experts." in name:
            _, _, local, linear, _ = name.split(".")
            state = moments[name]
            found[model.mlp.local_expert_indices[int(local)], linear] = (parameter.data, state["exp_avg"], state["exp_avg_sq"])
    return found


def numbers(expert: int, linear: str) -> tuple[float, float, float]:
    return (expert + 0.5 if linear == "linear_fc1" else 100.0 + expert, 10.0 + expert, 20.0 + expert)


def content(model: Model, optimizer: Any) -> dict[str, Any]:
    """What is saved: the model, and Adam's moments sharded as Megatron's optimizers shard them."""
    metadata: dict[str, Any] = {"singleton_local_shards": False}
    if helpers.MEGATRON >= (0, 17):
        metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    sharded = model.sharded_state_dict(metadata=metadata)
    moments = {}
    for name, state in moments_of(model, optimizer).items():
        for moment in ("exp_avg", "exp_avg_sq"):
            key = f"optimizer.state.{moment}"
            parameter = sharded[f"{PREFIX}{name}"]
            moments[f"{name}/{moment}"] = make_sharded_optimizer_tensor(parameter, state[moment], prefix=key)
    return {"model": sharded, "moments": moments}


def save(rank: int, folder: str, backend: str, ep_size: int) -> dict[str, list[int]]:
    """Writes a fingerprinted checkpoint; the global shapes in the file, by key."""
    multiprocessing.current_process()._config["daemon"] = False  # Megatron's writer starts a process of its own
    model, optimizer = build(backend, ep_size)
    for (expert, linear), tensors in experts_of(model, optimizer).items():
        for tensor, number in zip(tensors, numbers(expert, linear), strict=True):
            tensor.fill_(number)
    if rank == 0:
        Path(folder).mkdir(exist_ok=True)
    torch.distributed.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist_checkpointing.save(content(model, optimizer), folder)
        in_file = dist_checkpointing.load_tensors_metadata(folder)
    return {key: list(tensor.global_shape) for key, tensor in in_file.items()}


def load(rank: int, folder: str, backend: str, ep_size: int) -> list[str]:
    """Loads into a model with other numbers; what does not have its fingerprint afterwards."""
    model, optimizer = build(backend, ep_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = dist_checkpointing.load(content(model, optimizer), folder)
    model.mlp.load_state_dict({key.removeprefix(PREFIX): value for key, value in loaded["model"].items()})
    for name, state in moments_of(model, optimizer).items():
        for moment in ("exp_avg", "exp_avg_sq"):
            state[moment].copy_(loaded["moments"][f"{name}/{moment}"])
    found = experts_of(model, optimizer)
    assert len(found) == 2 * 4 // ep_size
    return [
        f"expert {expert} {linear}: {float(tensor.flatten()[0])}, wanted {number}"
        for (expert, linear), tensors in found.items()
        for tensor, number in zip(tensors, numbers(expert, linear), strict=True)
        if not bool((tensor == number).all())
    ]


def test_d_t1_fingerprints_across_ep_and_backends(ranks4: RankPool) -> None:
    """Saved at EP 2 by one backend, loaded at EP 1, 2 and 4 by either, and back. Four ranks: expert-data-parallel where EP is less."""
    with tempfile.TemporaryDirectory() as folder:
        first = f"{folder}/ep2"
        shapes = ranks4.run(save, first, "mok", 2, timeout=120)[0]
        of_experts = {key: shape for key, shape in shapes.items() if ".experts." in key}
        assert len(of_experts) == 6 and all(shape[0] == 4 for shape in of_experts.values()), of_experts
        for backend, ep_size in (("alltoall", 1), ("mok", 1), ("alltoall", 2), ("mok", 4)):
            for wrong in ranks4.run(load, first, backend, ep_size, timeout=120):
                assert wrong == [], (backend, ep_size)
        second = f"{folder}/ep4"
        ranks4.run(save, second, "alltoall", 4, timeout=120)
        for wrong in ranks4.run(load, second, "mok", 2, timeout=120):
            assert wrong == []


def test_d_t3_nothing_is_added() -> None:
    """Keys and shapes with MoK = without; each parameter once in the optimizer."""
    shapes, sharded = {}, {}
    for backend in ("mok", "alltoall"):
        model, optimizer = build(backend, 1)
        shapes[backend] = {k: v.shape for k, v in model.mlp.state_dict().items() if isinstance(v, torch.Tensor)}
        keys = content(model, optimizer)["model"]
        sharded[backend] = {k: getattr(v, "global_shape", None) for k, v in keys.items()}
        in_optimizer = [
            id(p)
            for part in getattr(optimizer, "chained_optimizers", [optimizer])
            for group in part.optimizer.param_groups
            for p in group["params"]
        ]
        assert sorted(in_optimizer) == sorted(id(p) for p in model.mlp.parameters())
    assert len(shapes["mok"]) == 1 + 2 * 4
    assert shapes["mok"] == shapes["alltoall"]
    assert sharded["mok"] == sharded["alltoall"]
