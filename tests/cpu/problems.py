"""Global batches, and running them through mok_megatron.functional on some ranks, for the tests of this folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from mok_megatron.config import MoKConfig
from tests.distributed import RankPool, job_group
from tests.oracle import OracleResult, assert_within, moe_oracle

OUTPUTS = ("y", "dx", "d_router_weights", "dw13", "dw2")
SMALLEST_RING = {"minibatch_size": 128, "macrobatch_size": 128}


@dataclasses.dataclass
class Batch:
    """One global batch: x, dy [T, H]; router_weights, topk_experts [T, K]; w13 [E, 2I, H]; w2 [E, H, I]."""

    x: torch.Tensor
    router_weights: torch.Tensor
    topk_experts: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    dy: torch.Tensor

    @property
    def experts(self) -> int:
        return self.w13.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    def oracle(self, grad_dtype: torch.dtype | None = None) -> OracleResult:
        return moe_oracle(
            self.x,
            self.router_weights,
            self.topk_experts,
            self.w13,
            self.w2,
            self.dy,
            dtype=self.dtype,
            grad_dtype=grad_dtype,
        )


def random_routes(tokens: int, experts: int, topk: int, generator: torch.Generator, missing: float = 0.1) -> torch.Tensor:
    """int32 [T, K]: distinct experts in ascending order, each route absent (-1) with probability ``missing``."""
    routes = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :topk].sort(1).values.to(torch.int32)
    routes[torch.rand(tokens, topk, generator=generator) < missing] = -1
    return routes


def random_batch(
    seed: int,
    tokens: int,
    *,
    hidden: int = 64,
    intermediate: int = 64,
    experts: int = 4,
    topk: int = 2,
    dtype: torch.dtype = torch.float32,
    missing: float = 0.1,
    routes: torch.Tensor | None = None,
) -> Batch:
    """A batch whose gates, outputs and gradients are of order one; ``routes`` replaces the random ones."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    x, dy = normal(tokens, hidden), normal(tokens, hidden)
    weights = torch.rand(tokens, topk, generator=generator)
    w13 = normal(experts, 2 * intermediate, hidden, scale=hidden**-0.5)
    w2 = normal(experts, hidden, intermediate, scale=intermediate**-0.5)
    drawn = random_routes(tokens, experts, topk, generator, missing)
    return Batch(x, weights, drawn if routes is None else routes.to(torch.int32), w13, w2, dy)


@dataclasses.dataclass
class Run:
    """How a batch is run. ``tokens``: local tokens of each rank, in the order of the batch; its length is EP."""

    tokens: tuple[int, ...]
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    num_local_tokens: int | None = None  # most tokens of any rank, by default the largest of ``tokens``
    weights_as_list: bool = False
    main_grads: torch.dtype | None = None  # dtype of main_grad buffers; None: gradients are returned
    main_grad_fill: float = 0.0
    overwrite: bool | tuple[bool, bool] = False  # for both, or for w13 and w2
    recompute: bool = False  # backward from recompute_forward_context instead of the context of forward
    poison: bool = False  # fill the workspace's buffers with NaN first
    repeats: int = 1  # the last one's results are returned


@dataclasses.dataclass
class Result:
    """Global results, ranks joined, and per rank the rows of its schedule and the size of its ring."""

    y: torch.Tensor
    dx: torch.Tensor
    d_router_weights: torch.Tensor
    dw13: torch.Tensor
    dw2: torch.Tensor
    expert_rows: list[int]
    num_rows: list[int]
    macrobatch_size: list[int]

    def macrobatches(self) -> list[int]:
        """Macrobatches of every rank."""
        return [-(-rows // size) for rows, size in zip(self.num_rows, self.macrobatch_size, strict=True)]


def even_tokens(tokens: int, ep_size: int) -> tuple[int, ...]:
    """``tokens`` over ``ep_size`` ranks, as even as it goes."""
    return tuple(tokens * (r + 1) // ep_size - tokens * r // ep_size for r in range(ep_size))


def workspace_for(batch: Batch, run: Run, group: Any) -> tuple[MoKConfig, Any]:
    """Config and workspace of a rank for this batch."""
    from mok_megatron import functional

    config = MoKConfig(**{"timeout_seconds": 30.0, **run.config})
    workspace = functional.get_workspace(
        config,
        group,
        device=torch.device("cpu"),
        num_local_tokens=run.num_local_tokens or max(*run.tokens, 1),
        hidden_size=batch.x.shape[1],
        topk=batch.topk_experts.shape[1],
        num_local_experts=batch.experts // len(run.tokens),
        intermediate_size=batch.w2.shape[2],
        dtype=batch.dtype,
    )
    return config, workspace


def local_part(batch: Batch, tokens: Sequence[int], rank: int) -> Batch:
    """Tokens and experts of one rank."""
    first, count = sum(tokens[:rank]), tokens[rank]
    rows = slice(first, first + count)
    share = batch.experts // len(tokens)
    experts = slice(rank * share, (rank + 1) * share)
    return Batch(
        batch.x[rows].contiguous(),
        batch.router_weights[rows].contiguous(),
        batch.topk_experts[rows].contiguous(),
        batch.w13[experts].contiguous(),
        batch.w2[experts].contiguous(),
        batch.dy[rows].contiguous(),
    )


def poison_workspace(workspace: Any) -> int:
    """Fill every floating-point buffer of the workspace with NaN (symmetric buffers, ring, scratch) and say how many there were."""
    seen: set[int] = set()
    filled = 0

    def visit(value: Any, depth: int) -> None:
        nonlocal filled
        if isinstance(value, torch.Tensor):
            if value.is_floating_point() and value.numel():
                value.fill_(float("nan"))
                filled += 1
        elif depth < 5 and id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, dict):
                children: Sequence[Any] = list(value.values())
            elif isinstance(value, (list, tuple)):
                children = value
            elif type(value).__module__.startswith("mok_megatron"):
                children = list(getattr(value, "__dict__", {}).values())
            else:
                children = ()
            for child in children:
                visit(child, depth + 1)

    visit(workspace, 0)
    return filled


def run_on_rank(rank: int, batch: Batch, run: Run, use_group: bool = True) -> dict[str, Any]:
    """Forward and backward of one rank's part; runs on a rank (or in this process with ``use_group=False``)."""
    from mok_megatron import functional

    group = job_group() if use_group else None
    config, workspace = workspace_for(batch, run, group)
    part = local_part(batch, run.tokens, rank)
    w13: Any = list(part.w13.unbind(0)) if run.weights_as_list else part.w13
    w2: Any = list(part.w2.unbind(0)) if run.weights_as_list else part.w2
    for _ in range(run.repeats):
        if run.poison:
            if group is not None:  # nobody may still be reading
                torch.distributed.barrier(group)
            if poison_workspace(workspace) == 0:
                raise AssertionError("found no buffer to poison in the workspace")
            if group is not None:
                torch.distributed.barrier(group)
        schedule = functional.build_schedule(workspace, config, part.topk_experts)
        y, context = functional.forward(config, workspace, schedule, part.x, part.router_weights, w13, w2, save_context=not run.recompute)
        if run.recompute:
            context = functional.recompute_forward_context(config, workspace, schedule, part.x, part.router_weights, w13)
        grads: Any = None
        if run.main_grads is not None:
            grads = tuple(torch.full(w.shape, run.main_grad_fill, dtype=run.main_grads) for w in (part.w13, part.w2))
        passed = grads
        if grads is not None and run.weights_as_list:
            passed = tuple(list(g.unbind(0)) for g in grads)
        overwrite = run.overwrite if isinstance(run.overwrite, tuple) else (run.overwrite, run.overwrite)
        dx, d_router_weights, dw13, dw2 = functional.backward(
            config,
            workspace,
            schedule,
            context,
            part.dy,
            part.x,
            part.router_weights,
            w13,
            w2,
            main_grads=passed,
            overwrite_main_grads=overwrite,
        )
        if grads is not None:
            if dw13 is not None or dw2 is not None:
                raise AssertionError("weight gradients were returned although there are main_grads")
            dw13, dw2 = grads
        elif run.weights_as_list:
            if not isinstance(dw13, (list, tuple)) or not isinstance(dw2, (list, tuple)):
                raise AssertionError("weights came as sequences, gradients did not")
            dw13, dw2 = torch.stack(list(dw13)), torch.stack(list(dw2))
    return {
        "y": y,
        "dx": dx,
        "d_router_weights": d_router_weights,
        "dw13": dw13,
        "dw2": dw2,
        "expert_rows": schedule.expert_rows.tolist(),
        "num_rows": int(schedule.num_rows),
        "macrobatch_size": workspace.macrobatch_size,
    }


def join(parts: Sequence[dict[str, Any]]) -> Result:
    """Results of all ranks as one global result."""
    joined = {name: torch.cat([p[name] for p in parts]) for name in OUTPUTS}
    return Result(
        **joined,
        expert_rows=[count for p in parts for count in p["expert_rows"]],
        num_rows=[p["num_rows"] for p in parts],
        macrobatch_size=[p["macrobatch_size"] for p in parts],
    )


def execute(pool: RankPool | None, batch: Batch, run: Run, timeout: float = 60.0) -> Result:
    """Run a batch over ``len(run.tokens)`` ranks of the pool (``None``: EP 1 in this process, without torch.distributed)."""
    if sum(run.tokens) != batch.x.shape[0]:
        raise ValueError(f"ranks bring {run.tokens}, the batch has {batch.x.shape[0]} tokens")
    if pool is None:
        return join([run_on_rank(0, batch, run, False)])
    return join(pool.run(run_on_rank, batch, run, ranks=len(run.tokens), timeout=timeout))


def assert_same_bits(got: Result, want: Result, names: Sequence[str] = OUTPUTS) -> None:
    """Fail, naming the first element, unless the results agree in every bit (so that 0.0 and -0.0, or two NaNs, differ too)."""
    for name in names:
        a, b = getattr(got, name), getattr(want, name)
        assert a.dtype == b.dtype and a.shape == b.shape, f"{name}: {a.dtype} {a.shape} and {b.dtype} {b.shape}"
        width = torch.int16 if a.element_size() == 2 else torch.int32
        different = a.contiguous().view(width) != b.contiguous().view(width)
        if bool(different.any()):
            index = tuple(int(i) for i in torch.nonzero(different)[0])
            count = int(different.sum())
            text = f"{name}: {count} of {a.numel()} elements differ, first at {index}: {float(a[index])!r}, {float(b[index])!r}"
            raise AssertionError(text)


def assert_matches_oracle(got: Result, want: OracleResult, names: Sequence[str] = OUTPUTS) -> None:
    """Every element within its bound, exact zeros for absent routes, and every route counted."""
    for name in names:
        expected = getattr(want, name)
        assert expected is not None
        assert_within(name, getattr(got, name), expected)
    assert got.expert_rows == want.counts.tolist()
