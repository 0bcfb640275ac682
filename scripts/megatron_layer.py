"""Times Megatron's MoE layer with TEGroupedMLP: MoK beside stock dispatchers, forward and forward with backward.

    torchrun --nproc-per-node 2 scripts/megatron_layer.py [--shapes qwen3-30b ...] [--backends mok alltoall ...] [--json FILE]

Every backend has the same weights and tokens; FP32 main_grad under Megatron's DDP; T tokens a GPU; EP = number of processes, experts a GPU
as in the table SHAPES. Rounds interleave the backends and passes; a number is the median over the rounds of the slowest rank's time between
two CUDA events. ``both`` is a forward with its backward in a row of several, as a model has layers and microbatches in a row: a backend that
waits for the GPU in between pays for it here, one that does not runs ahead. ``forward`` and ``both alone`` start on an idle GPU, so that the
host's time is in them; ``host`` is how long the process takes to launch that forward. With one GPU: EP 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SHAPES = {
    # H, I, routes a token, experts a GPU
    "qwen3-30b": (2048, 768, 8, 16),
    "qwen3-235b": (4096, 1536, 8, 16),
    "qwen3.5-397b": (4096, 1024, 10, 64),
    "kimi-k2": (7168, 2048, 8, 48),
}
BACKENDS = ("mok", "alltoall", "allgather", "hybridep")
COLUMNS = ("forward", "both alone", "both", "host")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen3-30b", "qwen3.5-397b", "kimi-k2"])
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=["mok", "alltoall"])
    parser.add_argument("--tokens", type=int, default=4096, help="tokens a GPU (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds over all backends (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=5, help="untimed rounds of each backend (default: %(default)s)")
    parser.add_argument("--in-a-row", type=int, default=4, help="forwards with backwards between two events (default: %(default)s)")
    parser.add_argument("--router-fusion", action="store_true", help="as Megatron's --moe-router-fusion, for every backend")
    parser.add_argument("--seed", type=int, default=0, help="of weights and tokens (default: %(default)s)")
    parser.add_argument("--knob", action="append", default=[], metavar="NAME=NUMBER", help="a knob of MoKConfig")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the numbers")
    return parser.parse_args()


def build(backend: str, shape: tuple[int, int, int, int], options: argparse.Namespace) -> Any:
    """The layer under Megatron's DDP."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mok_megatron import MoKConfig
    from mok_megatron.megatron import apply_mok_to_megatron

    hidden, inner, topk, local_experts = shape
    experts = local_experts * dist.get_world_size()
    knobs = {name: (float(value) if "." in value else int(value)) for name, value in (k.split("=") for k in options.knob)}
    apply_mok_to_megatron(
        backend="megatron" if backend == "allgather" else backend, config=MoKConfig(**knobs), max_tokens_per_rank=options.tokens
    )
    config = TransformerConfig(
        num_layers=1, hidden_size=hidden, num_attention_heads=16, ffn_hidden_size=inner, moe_ffn_hidden_size=inner,
        num_moe_experts=experts, moe_router_topk=topk, moe_router_dtype="fp32", moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather" if backend == "allgather" else "alltoall", moe_grouped_gemm=True,
        moe_permute_fusion=True, moe_router_fusion=options.router_fusion, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False,
        bias_activation_fusion=True, gradient_accumulation_fusion=True, params_dtype=torch.bfloat16, bf16=True,
        expert_model_parallel_size=dist.get_world_size(),
    )  # fmt: skip
    layer = get_moe_module_spec(use_te=True, num_experts=experts, moe_grouped_gemm=True)(config=config)
    layer.set_layer_number(1)
    layer = layer.cuda().bfloat16()
    generator = torch.Generator(device="cuda").manual_seed(options.seed)
    with torch.no_grad():
        layer.router.weight.normal_(std=hidden**-0.5, generator=generator)
        generator.manual_seed(options.seed + 1 + dist.get_rank())
        for parameter in layer.experts.parameters():
            parameter.normal_(std=0.02, generator=generator)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    return DistributedDataParallel(config, ddp, layer)


class Row:
    """One backend's layer with its inputs."""

    def __init__(self, backend: str, shape: tuple[int, int, int, int], options: argparse.Namespace) -> None:
        self.model = build(backend, shape, options)
        self.model.zero_grad_buffer()
        generator = torch.Generator(device="cuda").manual_seed(options.seed + 100 + dist.get_rank())
        size = (options.tokens, 1, shape[0])
        self.in_a_row = options.in_a_row
        self.x = torch.randn(size, device="cuda", generator=generator).bfloat16().requires_grad_(True)
        self.dy = torch.randn(size, device="cuda", generator=generator).bfloat16()

    def forward(self) -> torch.Tensor:
        with torch.no_grad():
            return self.model(self.x)[0]

    def both(self) -> None:
        self.x.grad = None
        with self.model.no_sync():
            self.model(self.x)[0].backward(self.dy)

    def several(self) -> None:
        for _ in range(self.in_a_row):
            self.both()


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """(GPU milliseconds, host milliseconds), the slowest rank's."""
    dist.barrier()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    began = time.perf_counter()
    work()
    host = (time.perf_counter() - began) * 1e3
    end.record()
    torch.cuda.synchronize()
    both = torch.tensor([start.elapsed_time(end), host], device="cuda")
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    return tuple(both.tolist())


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    rows: dict[str, Row] = {}
    setting = {"shape": name, "tokens": options.tokens, "ranks": dist.get_world_size(), "router fusion": options.router_fusion}
    result: dict[str, Any] = {**setting, "backends": {}}
    for backend in options.backends:
        try:
            rows[backend] = Row(backend, SHAPES[name], options)
            for _ in range(options.warmup):
                rows[backend].forward()
                rows[backend].both()
            torch.cuda.synchronize()
        except (ImportError, torch.OutOfMemoryError) as error:
            result["backends"][backend] = {"error": str(error)[:300]}
            rows.pop(backend, None)
    base = next((rows[b].forward().float() for b in ("alltoall", "allgather") if b in rows), None)
    samples: dict[str, dict[str, list[float]]] = {backend: {key: [] for key in COLUMNS} for backend in rows}
    for _ in range(options.rounds):
        for backend, row in rows.items():
            forward, host = timed(row.forward)
            samples[backend]["forward"].append(forward)
            samples[backend]["host"].append(host)
        for backend, row in rows.items():
            samples[backend]["both alone"].append(timed(row.both)[0])
        for backend, row in rows.items():
            samples[backend]["both"].append(timed(row.several)[0] / options.in_a_row)
    for backend, values in samples.items():
        entry = {key: summary(times) for key, times in values.items()}
        if base is not None:
            y = rows[backend].forward().float()
            entry["distance from stock"] = float((y - base).norm() / base.norm())
        result["backends"][backend] = entry
    rows.clear()
    return result


def summary(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {"median": statistics.median(ordered), "p10": ordered[len(ordered) // 10], "p90": ordered[-1 - len(ordered) // 10]}


def show(result: dict[str, Any]) -> None:
    print(f"\n{result['shape']}: {result['tokens']} tokens a GPU, EP {result['ranks']}; milliseconds, median (p10 to p90)")
    ours = result["backends"].get("mok", {})
    for backend, entry in result["backends"].items():
        if "error" in entry:
            print(f"  {backend:<10} {entry['error']}")
            continue
        cells = [f"{key} {entry[key]['median']:.3f} ({entry[key]['p10']:.3f} to {entry[key]['p90']:.3f})" for key in COLUMNS]
        if backend != "mok" and "both" in ours:
            cells += ["over MoK: " + ", ".join(f"{key} {entry[key]['median'] / ours[key]['median']:.2f}" for key in COLUMNS)]
        if "distance from stock" in entry:
            cells += [f"y off stock by {entry['distance from stock']:.1e}"]
        print(f"  {backend:<10} {', '.join(cells)}", flush=True)


def main() -> int:
    options = arguments()
    for name in ("tokens", "rounds", "in_a_row"):
        if getattr(options, name) < 1:
            raise SystemExit(f"megatron_layer.py: --{name.replace('_', '-')} {getattr(options, name)}: must be at least 1")
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("megatron_layer.py: must be started by torchrun: torchrun --nproc-per-node 2 scripts/megatron_layer.py")
    local, processes = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() < processes:
        raise SystemExit(f"megatron_layer.py: needs a GPU a process, {processes} in all, {torch.cuda.device_count()} found")
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(1, 1, expert_model_parallel_size=dist.get_world_size())
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    results = []
    for name in options.shapes:
        results.append(measure(name, options))
        if dist.get_rank() == 0:
            show(results[-1])
            if options.json is not None:
                options.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "results": results}, indent=1))
        from mok_megatron.functional import clear_workspaces

        clear_workspaces()
        gc.collect()
        torch.cuda.empty_cache()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
