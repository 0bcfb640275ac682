"""A bad argument on one rank is an error on every rank: no hang, the offender's own message everywhere, and the workspace still works."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mok_megatron import MoKArgumentError, MoKConfig, MoKError, functional, protocol
from tests.cpu.problems import Batch, Run, execute, local_part, random_batch, run_on_rank, workspace_for
from tests.distributed import RankPool, job_group, run_ranks_outcomes

RUN = Run((5, 9, 2), num_local_tokens=9)
OFFENDER = 1
Operands = dict[str, Any]

# What the offending rank does to its operands, and what the message must contain.
FORWARD_FAULTS: dict[str, tuple[Callable[[Operands], None], tuple[str, ...]]] = {
    "x-rows": (lambda o: o.update(x=o["x"][:-1]), ("x", "[8, 64]", "[9, 64]")),
    "x-width": (lambda o: o.update(x=o["x"][:, :32]), ("x", "[9, 32]")),
    "x-dtype": (lambda o: o.update(x=o["x"].double()), ("x", "float64", "float32")),
    "x-dim": (lambda o: o.update(x=o["x"][None]), ("x", "[1, 9, 64]")),
    "x-none": (lambda o: o.update(x=None), ("x", "NoneType")),
    "p-shape": (lambda o: o.update(router_weights=o["router_weights"][:, :1]), ("router_weights", "[9, 1]")),
    "p-dtype": (lambda o: o.update(router_weights=o["router_weights"].bfloat16()), ("router_weights", "bfloat16")),
    "w13-shape": (lambda o: o.update(w13=o["w13"][:, :64]), ("w13", "[2, 64, 64]")),
    "w13-count": (lambda o: o.update(w13=list(o["w13"])[:1]), ("w13", "2 tensors")),
    "w13-entry": (lambda o: o.update(w13=[o["w13"][0], o["w13"][1].T]), ("w13[1]", "[64, 128]")),
    "w2-dtype": (lambda o: o.update(w2=o["w2"].bfloat16()), ("w2", "bfloat16")),
    "w2-none": (lambda o: o.update(w2=[o["w2"][0], None]), ("w2[1]", "None")),
    "schedule": (lambda o: o.update(schedule="no"), ("schedule", "str")),
}
BACKWARD_FAULTS: dict[str, tuple[Callable[[Operands], None], tuple[str, ...]]] = {
    "dy-shape": (lambda o: o.update(dy=o["dy"][:3]), ("dy", "[3, 64]")),
    "dy-dtype": (lambda o: o.update(dy=o["dy"].half()), ("dy", "float16")),
    "ctx-type": (lambda o: o.update(ctx=None), ("ctx", "NoneType")),
    "grads-shape": (lambda o: o.update(main_grads=(o["w13"][:1], None)), ("main_grads", "w13", "[1, 128, 64]")),
    "grads-dtype": (lambda o: o.update(main_grads=(None, o["w2"].double())), ("main_grads", "w2", "float64")),
    "grads-pair": (lambda o: o.update(main_grads=(None,)), ("main_grads", "pair")),
    "grads-tensor": (lambda o: o.update(main_grads=o["w13"]), ("main_grads", "pair")),
    "overwrite": (
        lambda o: o.update(main_grads=(o["w13"], None), overwrite_main_grads=([True], False)),
        ("overwrite_main_grads", "w13", "2 bools"),
    ),
}
SCHEDULE_FAULTS: dict[str, tuple[Callable[[Operands], None], tuple[str, ...]]] = {
    "ids-dtype": (lambda o: o.update(topk_experts=o["topk_experts"].float()), ("topk_experts", "float32")),
    "ids-width": (lambda o: o.update(topk_experts=o["topk_experts"][:, :1]), ("topk_experts", "[9, 1]")),
    "too-many-tokens": (
        lambda o: o.update(topk_experts=torch.full((10, 2), -1)),
        ("10 tokens", "num_local_tokens=9", f"rank {OFFENDER}"),
    ),
}


def _attempt(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except MoKError as error:
        return type(error).__name__, str(error)
    return "none", ""


def _faulty_calls(rank: int, batch: Batch, kind: str, names: list[str]) -> tuple[list[tuple[str, str]], torch.Tensor]:
    """One call a fault, in which rank OFFENDER's operands are bad; then a whole good step on the same workspace."""
    config, workspace = workspace_for(batch, RUN, job_group())
    part = local_part(batch, RUN.tokens, rank)
    schedule = functional.build_schedule(workspace, config, part.topk_experts)
    good: Operands = {"schedule": schedule, "x": part.x, "router_weights": part.router_weights, "w13": part.w13}
    good["w2"] = part.w2
    _, context = functional.forward(config, workspace, **good)
    table = {"forward": FORWARD_FAULTS, "backward": BACKWARD_FAULTS, "schedule": SCHEDULE_FAULTS}[kind]
    found = []
    for name in names:
        operands: Operands = dict(good)
        if kind == "backward":
            operands.update(ctx=context, dy=part.dy)
        if kind == "schedule":
            operands = {"topk_experts": part.topk_experts}
        if rank == OFFENDER:
            table[name][0](operands)
        function = functional.build_schedule if kind == "schedule" else getattr(functional, kind)
        found.append(_attempt(lambda f=function, o=operands: f(workspace=workspace, config=config, **o)))
    return found, run_on_rank(rank, batch, RUN)["y"]


@pytest.mark.parametrize(
    ("kind", "table"),
    [("schedule", SCHEDULE_FAULTS), ("forward", FORWARD_FAULTS), ("backward", BACKWARD_FAULTS)],
    ids=["build_schedule", "forward", "backward"],
)
def test_a_bad_argument_on_one_rank_is_an_error_on_every_rank(
    ranks4: RankPool, seed: int, kind: str, table: dict[str, tuple[Any, tuple[str, ...]]]
) -> None:
    batch = random_batch(seed, 16, experts=6)
    names = list(table)
    start = time.monotonic()
    results = ranks4.run(_faulty_calls, batch, kind, names, ranks=3)
    assert time.monotonic() - start < 30
    for rank, (found, _) in enumerate(results):
        for name, (error, text) in zip(names, found, strict=True):
            assert error == ("MoKArgumentError" if rank == OFFENDER else "MoKPeerError"), (name, rank, error, text)
            for piece in table[name][1]:
                assert piece in text, (name, rank, text)
            assert rank == OFFENDER or f"rank {OFFENDER}" in text
    want = execute(None, batch, Run((16,)))
    assert torch.equal(torch.cat([y for _, y in results]), want.y)


def _refusals(rank: int, batch: Batch, offenders: list[int]) -> list[tuple[str, str]]:
    """Calls that the offenders refuse, one after the other, while the other ranks look at their flags only every 20 ms."""
    config, workspace = workspace_for(batch, RUN, job_group())
    part = local_part(batch, RUN.tokens, rank)
    schedule = functional.build_schedule(workspace, config, part.topk_experts)
    ids = torch.full((1, 2), 99) if rank in offenders else part.topk_experts
    x = part.x[:, :32] if rank in offenders else part.x
    clock = protocol.time
    if rank not in offenders:
        protocol.time = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: time.sleep(0.02))  # type: ignore[assignment]
    try:
        found = [_attempt(lambda: functional.build_schedule(workspace, config, ids)) for _ in range(5)]
        operands = (config, workspace, schedule, x, part.router_weights, part.w13, part.w2)
        found += [_attempt(lambda: functional.forward(*operands)) for _ in range(5)]
    finally:
        protocol.time = clock
    return found


@pytest.mark.parametrize("offenders", [[1], [0, 2]], ids=["one", "two"])
def test_refusals_in_a_row_are_all_seen_by_slow_peers(ranks4: RankPool, seed: int, offenders: list[int]) -> None:
    """Nobody takes a refused call for a good one, however fast the offender goes on to its next call."""
    results = ranks4.run(_refusals, random_batch(seed, 16, experts=6), offenders, ranks=3)
    for rank, found in enumerate(results):
        want = "MoKArgumentError" if rank in offenders else "MoKPeerError"
        assert [kind for kind, _ in found] == [want] * 10, (rank, found)


def _workspace_attempt(rank: int, changes: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """get_workspace with rank OFFENDER's arguments changed, for shapes that no other test has a workspace for."""
    found = []
    for change in changes:
        config = MoKConfig(**(change.get("config", {}) if rank == OFFENDER else {}))
        arguments: dict[str, Any] = {
            "device": "cpu",
            "num_local_tokens": 16,
            "hidden_size": 64,
            "topk": 3,
            "num_local_experts": 5,
            "intermediate_size": 64,
            "dtype": torch.float32,
        }
        if rank == OFFENDER:
            arguments.update({k: v for k, v in change.items() if k != "config"})
        found.append(_attempt(lambda c=config, a=arguments: functional.get_workspace(c, job_group(), **a)))
    return found


def test_workspace_arguments_are_checked_on_every_rank(ranks4: RankPool) -> None:
    changes: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
        "hidden": ({"hidden_size": 100}, ("hidden_size=100", "multiple of 64")),
        "intermediate": ({"intermediate_size": 96}, ("intermediate_size=96", "multiple of 64")),
        "topk": ({"topk": 33}, ("topk=33", "32")),
        "topk-experts": ({"topk": 16}, ("topk=16", "number of experts", "15")),
        "experts": ({"num_local_experts": 257}, ("num_local_experts=257", "256")),
        "tokens": ({"num_local_tokens": -1}, ("num_local_tokens=-1",)),
        "float": ({"hidden_size": 64.0}, ("hidden_size=64.0", "integer")),
        "dtype": ({"dtype": torch.float16}, ("float16", "bfloat16")),
        "slots": ({"num_local_tokens": 2**31}, ("num_local_tokens", "2^31")),
        "differs": ({"hidden_size": 128}, ("hidden_size", "equal on all ranks", "64", "128")),
        "differs-dtype": ({"dtype": torch.bfloat16}, ("dtype", "equal on all ranks")),
        "differs-ring": ({"config": {"macrobatch_size": 256}}, ("macrobatch_size", "equal on all ranks")),
    }
    results = ranks4.run(_workspace_attempt, [change for change, _ in changes.values()], ranks=3)
    for rank, found in enumerate(results):
        for (kind, text), (name, (_, pieces)) in zip(found, changes.items(), strict=True):
            assert kind == "MoKArgumentError", (name, rank, kind, text)
            for piece in pieces:
                assert piece in text, (name, rank, text)


def _agreed(rank: int) -> tuple[int, bool, int]:
    arguments: dict[str, Any] = {
        "device": "cpu",
        "num_local_tokens": (10, 0, 70)[rank],
        "hidden_size": 64,
        "topk": 3,
        "num_local_experts": 7,
        "intermediate_size": 64,
        "dtype": torch.float32,
    }
    first = functional.get_workspace(MoKConfig(timeout_seconds=9.0), job_group(), **arguments)
    again = functional.get_workspace(MoKConfig(timeout_seconds=9.0), job_group(), **arguments)
    return first.num_local_tokens, first is again, sum(first.memory_bytes().values())


def test_workspace_agrees_on_the_largest_token_count_and_is_shared(ranks4: RankPool) -> None:
    results = ranks4.run(_agreed, ranks=3)
    assert results == [(70, True, results[0][2])] * 3 and results[0][2] > 0


def _grow_on_one_rank(rank: int) -> tuple[str, str]:
    """Everybody has a workspace for 64 tokens; then one rank alone asks for more."""

    def workspace(tokens: int) -> Any:
        return functional.get_workspace(
            MoKConfig(timeout_seconds=3.0),
            job_group(),
            device="cpu",
            num_local_tokens=tokens,
            hidden_size=64,
            topk=2,
            num_local_experts=2,
            intermediate_size=64,
            dtype=torch.float32,
        )

    workspace(64)
    config = MoKConfig(timeout_seconds=3.0)

    def step() -> None:
        space = workspace(640 if rank == OFFENDER else 64)
        functional.build_schedule(space, config, torch.zeros(1, 2, dtype=torch.int64) + torch.arange(2))

    return _attempt(step)


def test_a_t3_growing_the_workspace_on_one_rank_ends_on_all_ranks() -> None:
    """The others find theirs in the cache and go on, so the group cannot agree on it: an error that names the rank, and no hang."""
    start = time.monotonic()
    outcomes = run_ranks_outcomes(_grow_on_one_rank, 2, timeout=25)
    assert time.monotonic() - start < 25
    assert all(o.status == "ok" for o in outcomes), "\n".join(o.describe() for o in outcomes)
    kinds, texts = zip(*(o.value for o in outcomes), strict=True)
    assert kinds[OFFENDER] == "MoKArgumentError" and "num_local_tokens=640" in texts[OFFENDER], texts
    assert kinds[0] != "none" and f"rank {OFFENDER}" in texts[0], texts


def _breaks(rank: int, batch: Batch, slow: bool) -> list[tuple[str, str]]:
    """A fault that no argument causes, in the middle of rank OFFENDER's forward; then another try on the same workspace. The other ranks may be
    so slow that they look at the schedule's flags when it has happened already."""
    from mok_megatron import protocol
    from mok_megatron.executors import cpu

    config, workspace = workspace_for(batch, RUN, job_group())
    part = local_part(batch, RUN.tokens, rank)
    if slow and rank != OFFENDER:
        ready = protocol.FlagWait.ready

        def later(wait: protocol.FlagWait) -> bool:
            if wait.state.kind == protocol.CallKind.SCHEDULE:
                time.sleep(1.0)
            return ready(wait)

        protocol.FlagWait.ready = later  # type: ignore[method-assign]
    schedule = functional.build_schedule(workspace, config, part.topk_experts)
    operands = (config, workspace, schedule, part.x, part.router_weights, part.w13, part.w2)
    if rank == OFFENDER:

        def broken(*_: Any) -> None:
            raise MemoryError("no memory left for a tile")

        if slow:  # without rows of the others
            cpu.CpuPass.run = broken  # type: ignore[method-assign]
        else:
            cpu.activation = broken  # type: ignore[assignment]
    found = []
    for _ in range(2):
        try:
            functional.forward(*operands)
        except (MoKError, MemoryError) as error:
            found.append((type(error).__name__, str(error)))
    return found


@pytest.mark.parametrize("slow", [False, True])
def test_an_unexpected_failure_in_a_pass_reaches_every_rank(seed: int, slow: bool) -> None:
    """In that pass, not in the schedule before it."""
    batch = random_batch(seed, 16, experts=6, missing=0.0)
    start = time.monotonic()
    outcomes = run_ranks_outcomes(_breaks, 3, batch, slow, timeout=40)
    assert time.monotonic() - start < 25
    for outcome in outcomes:
        assert outcome.status == "ok", outcome.describe()
        (kind, text), (kind_after, text_after) = outcome.value
        assert kind == ("MemoryError" if outcome.rank == OFFENDER else "MoKPeerError"), outcome.value
        assert text.startswith(f"rank {outcome.rank}, forward of") or outcome.rank == OFFENDER, outcome.value
        assert "no memory left" in text and "cannot be used" in text_after, outcome.value
        assert kind_after == "MoKError" and "no memory left" in text_after, outcome.value


def test_a_workspace_for_one_rank_checks_its_arguments_too() -> None:
    with pytest.raises(MoKArgumentError, match=r"hidden_size=65"):
        functional.get_workspace(
            MoKConfig(),
            None,
            device="cpu",
            num_local_tokens=1,
            hidden_size=65,
            topk=1,
            num_local_experts=1,
            intermediate_size=64,
            dtype=torch.float32,
        )


def test_a_closed_workspace_says_so(seed: int) -> None:
    batch = random_batch(seed, 4)
    config, workspace = workspace_for(batch, Run((4,)), None)
    workspace.close()
    with pytest.raises(MoKError, match="closed"):
        functional.build_schedule(workspace, config, batch.topk_experts)
    assert workspace_for(batch, Run((4,)), None)[1] is not workspace
