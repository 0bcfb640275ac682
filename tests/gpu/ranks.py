"""What tests of the public functions share: a rank's group and workspace, and its part of a global batch, one GPU a rank.

Bodies of tests are called as fn(rank, ...) in processes of tests/distributed.py: kept ones (fixture ranks2), fresh ones where a process ends.
"""

import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.gpu.backward_runs import random_dy
from tests.gpu.harness import Problem, poison, random_problem

TOKENS, TOPK, HIDDEN, INNER, EXPERTS = 300, 4, 256, 192, 8
DEVICE = "cuda"
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs in one NVLink domain")
EP_SIZES = [1, pytest.param(2, marks=two_gpus)]


@functools.cache
def _group(ep_size: int) -> dist.ProcessGroup | None:
    """One communicator a process: making one takes longer than most tests."""
    return dist.new_group(list(range(ep_size)), backend="nccl") if ep_size > 1 else None


def start(rank: int, ep_size: int, *, num_local_tokens: int = TOKENS, timeout_seconds: float = 20.0, **knobs: Any):
    """The public functions, this rank's config and its workspace, every floating-point buffer of it poisoned."""
    from mok_megatron import MoKConfig
    from mok_megatron import functional as mok

    torch.cuda.set_device(rank)
    group = _group(ep_size)
    config = MoKConfig(timeout_seconds=timeout_seconds, **knobs)
    workspace = mok.get_workspace(
        config,
        group,
        device=DEVICE,
        num_local_tokens=num_local_tokens,
        hidden_size=HIDDEN,
        topk=TOPK,
        num_local_experts=EXPERTS // ep_size,
        intermediate_size=INNER,
        dtype=torch.bfloat16,
    )
    poison_shared(workspace)
    torch.cuda.synchronize()
    if group is not None:
        dist.barrier(group)
    return mok, config, workspace


def poison_shared(workspace: Any) -> None:
    """NaN in what this rank's peers read and write, on the current stream."""
    mine = workspace.mine
    for tensor in (mine.x, mine.router_weights, mine.combine, mine.dy, mine.d_router_weights):
        poison(tensor)


@dataclasses.dataclass
class Part:
    """One rank's part of a global batch, on its device: tokens, and its experts' weights."""

    routes: torch.Tensor
    x: torch.Tensor
    p: torch.Tensor
    dy: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor

    def copy_tokens(self, other: "Part") -> None:
        """Another part's routes, inputs and gradients of outputs in the memory of this one."""
        for name in ("routes", "x", "p", "dy"):
            getattr(self, name).copy_(getattr(other, name))

    def poison_tokens(self) -> None:
        for tensor in (self.x, self.p, self.dy):
            poison(tensor)
        self.routes.fill_(-1)


def batch(tokens: int, seed: int) -> tuple[Problem, torch.Tensor]:
    """A global batch as the problem of one rank, and dy."""
    problem = random_problem([tokens], HIDDEN, INNER, EXPERTS, TOPK, seed=seed, missing=0.1)
    return problem, random_dy(problem, seed + 1000)[0]


def take_part(problem: Problem, dy: torch.Tensor, tokens: list[int], rank: int) -> Part:
    """The part of a rank when ranks bring so many tokens each."""
    rows = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
    share = problem.w13.shape[0] // len(tokens)
    experts = slice(rank * share, (rank + 1) * share)
    whole = (problem.topk_experts[0], problem.x[0], problem.router_weights[0], dy)
    # Copies: tests change them in place, on the CPU too.
    return Part(*(t[part].clone().to(DEVICE) for t, part in zip((*whole, problem.w13, problem.w2), [rows] * 4 + [experts] * 2, strict=True)))


def random_part(tokens: list[int], seed: int, rank: int) -> Part:
    return take_part(*batch(sum(tokens), seed), tokens, rank)
