"""The public functions on GPUs: one process a rank over NCCL and torch symmetric memory."""

import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_ranks, run_ranks_outcomes
from tests.gpu.harness import Problem, poison, random_problem
from tests.oracle import assert_within, moe_oracle

TOKENS, TOPK, HIDDEN, INNER, EXPERTS = 300, 4, 256, 192, 8
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs in one NVLink domain")


def _start(rank: int, ep_size: int, timeout_seconds: float = 20.0, **knobs):
    """This rank's group, config and workspace, every floating-point buffer poisoned."""
    from mok_megatron import MoKConfig
    from mok_megatron import functional as mok

    torch.cuda.set_device(rank)
    group = dist.new_group(list(range(ep_size)), backend="nccl") if ep_size > 1 else None
    config = MoKConfig(timeout_seconds=timeout_seconds, **knobs)
    workspace = mok.get_workspace(
        config,
        group,
        device="cuda",
        num_local_tokens=TOKENS,
        hidden_size=HIDDEN,
        topk=TOPK,
        num_local_experts=EXPERTS // ep_size,
        intermediate_size=INNER,
        dtype=torch.bfloat16,
    )
    for tensor in (workspace.mine.x, workspace.mine.router_weights, workspace.mine.combine):
        poison(tensor)
    torch.cuda.synchronize()
    if group is not None:
        dist.barrier(group)
    return mok, config, workspace


def _split(tokens: list[int], seed: int, ep_size: int, rank: int):
    """One global batch of 2 * TOKENS tokens; this rank's part on its GPU."""
    problem = random_problem([sum(tokens)], HIDDEN, INNER, EXPERTS, TOPK, seed=seed, missing=0.1)
    rows = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
    experts = slice(rank * EXPERTS // ep_size, (rank + 1) * EXPERTS // ep_size)
    parts = problem.topk_experts[0][rows], problem.x[0][rows], problem.router_weights[0][rows]
    return [part.cuda() for part in parts], [problem.w13[experts].cuda(), problem.w2[experts].cuda()], problem


def _run_forward(rank: int, ep_size: int, tokens: list[int], seed: int) -> list[torch.Tensor]:
    mok, config, workspace = _start(rank, ep_size)
    outputs = []
    for step in range(3):
        (routes, x, p), weights, _ = _split(tokens, seed + step, ep_size, rank)
        schedule = mok.build_schedule(workspace, config, routes)
        y, context = mok.forward(config, workspace, schedule, x, p, *weights, save_context=step == 1)
        assert (context is not None) == (step == 1)
        outputs.append(y.cpu())
    return outputs


def _check(problem: Problem, y: torch.Tensor) -> None:
    want = moe_oracle(problem.x[0], problem.router_weights[0], problem.topk_experts[0], problem.w13, problem.w2, dtype=torch.bfloat16)
    assert_within("y", y, want.y)


def test_one_rank(seed):
    outputs = run_ranks(_run_forward, 1, 1, [TOKENS], seed, timeout=120)[0]
    for step, y in enumerate(outputs):
        _check(random_problem([TOKENS], HIDDEN, INNER, EXPERTS, TOPK, seed=seed + step, missing=0.1), y)


@two_gpus
@pytest.mark.parametrize("tokens", [[150, 150], [300, 0], [7, 293]])
def test_two_ranks_equal_one_bit_for_bit(tokens, seed):
    one = run_ranks(_run_forward, 1, 1, [sum(tokens)], seed, timeout=120)[0]
    two = run_ranks(_run_forward, 2, 2, tokens, seed, timeout=120)
    for step in range(3):
        joined = torch.cat([outputs[step] for outputs in two])
        _check(random_problem([sum(tokens)], HIDDEN, INNER, EXPERTS, TOPK, seed=seed + step, missing=0.1), joined)
        assert torch.equal(joined, one[step])


def _run_without_sync(rank: int, ep_size: int, tokens: list[int], seed: int) -> int:
    mok, config, workspace = _start(rank, ep_size)
    (routes, x, p), weights, _ = _split(tokens, seed, ep_size, rank)

    def step():
        schedule = mok.build_schedule(workspace, config, routes)
        return mok.forward(config, workspace, schedule, x, p, *weights, save_context=False)[0]

    first = step().clone()
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    torch.cuda.set_sync_debug_mode("error")
    # The host runs ahead of a GPU that starts late.
    torch.cuda._sleep(int(1e9))
    begin = time.monotonic()
    outputs = [step() for _ in range(50)]
    ahead = time.monotonic() - begin
    torch.cuda.set_sync_debug_mode("default")
    pending = not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert pending, f"50 calls took the host {ahead:.3f} s: it waited for the GPU"
    assert all(torch.equal(first, y) for y in outputs)
    return torch.cuda.memory_reserved() - reserved


@pytest.mark.parametrize("ep_size", [1, pytest.param(2, marks=two_gpus)])
def test_no_host_synchronisation(ep_size, seed):
    grown = run_ranks(_run_without_sync, ep_size, ep_size, [TOKENS // ep_size] * ep_size, seed, timeout=120)
    # Outputs and schedules of 50 calls are kept alive; nothing else may grow with the calls.
    assert all(bytes_ <= 64 << 20 for bytes_ in grown), grown


def _replay(rank: int, ep_size: int, tokens: list[int], seed: int) -> list[torch.Tensor]:
    mok, config, workspace = _start(rank, ep_size)
    (routes, x, p), weights, _ = _split(tokens, seed, ep_size, rank)

    def step():
        schedule = mok.build_schedule(workspace, config, routes)
        return mok.forward(config, workspace, schedule, x, p, *weights, save_context=False)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        graph = torch.cuda.CUDAGraph()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            y = step()
    results = []
    for repeat in range(10):
        (new_routes, new_x, new_p), _, _ = _split(tokens, seed + 1 + repeat, ep_size, rank)
        routes.copy_(new_routes)
        x.copy_(new_x)
        p.copy_(new_p)
        if repeat % 3 == rank:
            torch.cuda._sleep(int(5e7))
        graph.replay()
        torch.cuda.synchronize()
        replayed = y.clone()
        poison(x)
        poison(p)
        x.copy_(new_x)
        p.copy_(new_p)
        assert torch.equal(replayed, step()), f"replay {repeat} differs from the eager call"
        results.append(replayed.cpu())
    return results


@pytest.mark.parametrize("ep_size", [1, pytest.param(2, marks=two_gpus)])
def test_graph_replays_equal_eager(ep_size, seed):
    run_ranks(_replay, ep_size, ep_size, [TOKENS // ep_size] * ep_size, seed, timeout=120)


def _be_elsewhere() -> None:
    """Python that runs, far from any call of this package."""
    for _ in range(300):
        time.sleep(0.1)


def _one_rank_stays_away(rank: int, blocked: bool) -> None:
    from mok_megatron.protocol import PassTag

    mok, config, workspace = _start(rank, 2, timeout_seconds=3.0)
    (routes, x, p), weights, _ = _split([TOKENS // 2] * 2, 1, 2, rank)
    schedule = mok.build_schedule(workspace, config, routes)
    torch.cuda.synchronize()
    if rank == 1:
        time.sleep(15)
        raise SystemExit(3)
    mok.forward(config, workspace, schedule, x, p, *weights, tag=PassTag(1, 1))
    if blocked:
        time.sleep(60)
    _be_elsewhere()


@two_gpus
def test_f_t1_a_rank_that_does_not_come():
    for blocked in (False, True):
        outcome = run_ranks_outcomes(_one_rank_stays_away, 2, blocked, timeout=60)[0]
        assert outcome.seconds < 3 + 10 + 20  # start-up of CUDA and NCCL on top
        if blocked:
            # The main thread cannot take an exception: the watchdog prints it and ends the process.
            assert outcome.status == "died" and outcome.exit_code == 74, outcome.describe()
        else:
            assert outcome.status == "error" and outcome.error_types[0] == "MoKTimeoutError", outcome.describe()
        text = outcome.output if blocked else outcome.message
        for part in ("rank 0", "rank(s) 1 missing", "layer 1, microbatch 1", "expected", "limit 3 s"):
            assert part in text, text


def _one_rank_refuses(rank: int) -> None:
    mok, config, workspace = _start(rank, 2)
    (routes, x, p), weights, _ = _split([TOKENS // 2] * 2, 1, 2, rank)
    schedule = mok.build_schedule(workspace, config, routes)
    mok.forward(config, workspace, schedule, x[:, :128] if rank == 1 else x, p, *weights)
    _be_elsewhere()


@two_gpus
def test_a_refusal_reaches_the_other_rank():
    outcomes = run_ranks_outcomes(_one_rank_refuses, 2, timeout=60)
    assert outcomes[1].error_types[0] == "MoKArgumentError", outcomes[1].describe()
    assert outcomes[0].error_types[0] == "MoKPeerError" and "x: shape" in outcomes[0].message, outcomes[0].describe()


def _overflow(rank: int, ep_size: int) -> None:
    """All routes go to rank 0's experts, whose share is a hundredth."""
    mok, config, workspace = _start(rank, ep_size, schedule_capacity_multiplier=0.01)
    routes = torch.arange(TOPK, device="cuda").repeat(TOKENS, 1)
    schedule = mok.build_schedule(workspace, config, routes)
    x, p = torch.randn(TOKENS, HIDDEN, device="cuda").bfloat16(), torch.rand(TOKENS, TOPK, device="cuda")
    local = EXPERTS // ep_size
    w13 = torch.randn(local, 2 * INNER, HIDDEN, device="cuda").bfloat16()
    w2 = torch.randn(local, HIDDEN, INNER, device="cuda").bfloat16()
    mok.forward(config, workspace, schedule, x, p, w13, w2)
    _be_elsewhere()


@pytest.mark.parametrize("ep_size", [1, pytest.param(2, marks=two_gpus)])
def test_overflow_raises_on_every_rank(ep_size):
    needed = TOPK * -(-TOKENS * ep_size // 128) * 128
    for outcome in run_ranks_outcomes(_overflow, ep_size, ep_size, timeout=60):
        assert outcome.error_types[:1] == ("MoKCapacityError",), outcome.describe()
        assert f"rank 0 needs {needed} rows" in outcome.message, outcome.describe()


def _beside_spinning_kernels(rank: int, spinners: int, sm_reserve: int) -> None:
    """Kernels that hold SMs when the pass starts, and end only long after it."""
    mok, config, workspace = _start(rank, 1, sm_reserve=sm_reserve)
    (routes, x, p), weights, _ = _split([TOKENS], 1, 1, 0)
    schedule = mok.build_schedule(workspace, config, routes)
    first, _ = mok.forward(config, workspace, schedule, x, p, *weights)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(spinners)]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(6e9))
    time.sleep(0.05)
    done = torch.cuda.Event()
    y, _ = mok.forward(config, workspace, schedule, x, p, *weights)
    done.record()
    begin = time.monotonic()
    while not done.query() and time.monotonic() - begin < 2:
        time.sleep(0.001)
    assert done.query(), "the pass waits for the kernels that hold SMs"
    assert not streams[0].query(), "the kernels beside it ended too early to prove anything"
    torch.cuda.synchronize()
    assert torch.equal(first, y)


@pytest.mark.parametrize(("spinners", "sm_reserve"), [(1, 2), (24, 48)])
def test_kernels_that_hold_sms_do_not_hold_the_pass(spinners, sm_reserve):
    run_ranks(_beside_spinning_kernels, 1, spinners, sm_reserve, timeout=60)


def _collectives_in_opposite_order(rank: int) -> None:
    mok, config, workspace = _start(rank, 2, sm_reserve=32)
    (routes, x, p), weights, _ = _split([TOKENS // 2] * 2, 1, 2, rank)
    collectives = dist.new_group([0, 1], backend="nccl")
    data = torch.ones(1 << 24, device="cuda")
    dist.all_reduce(data, group=collectives)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()

    def reduce() -> None:
        with torch.cuda.stream(side):
            dist.all_reduce(data, group=collectives)

    outputs = []
    for repeat in range(6):
        if rank == repeat % 2:
            reduce()
        schedule = mok.build_schedule(workspace, config, routes)
        outputs.append(mok.forward(config, workspace, schedule, x, p, *weights)[0])
        if rank != repeat % 2:
            reduce()
    torch.cuda.synchronize()
    assert all(torch.equal(outputs[0], y) for y in outputs)
    assert float(data[0]) == 2.0**7


@two_gpus
def test_collectives_in_opposite_order_do_not_deadlock():
    run_ranks(_collectives_in_opposite_order, 2, timeout=60)
