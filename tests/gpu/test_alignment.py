"""Where tensors lie: weights and gradients that the kernels cannot read are refused before anything is launched; tokens may lie anywhere."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mok_megatron import MoKArgumentError
from tests.distributed import RankPool
from tests.gpu.backward_runs import assert_same_bits
from tests.gpu.ranks import EP_SIZES, EXPERTS, TOKENS, Part, random_part, start


def _shifted(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """The same values, contiguous, so many elements behind an address on 256 bytes."""
    flat = torch.empty(tensor.numel() + elements, dtype=tensor.dtype, device=tensor.device)
    return flat[elements:].view(tensor.shape).copy_(tensor)


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, column by column in memory."""
    return tensor.t().contiguous().t()


def _device_state(workspace: Any) -> torch.Tensor:
    """Words that every pass of this rank changes: the number of its finished calls among them."""
    torch.cuda.synchronize()
    return workspace.executor._state.clone()


def _assert_refused(workspace: Any, call: Callable[[], Any], text: str) -> None:
    before = _device_state(workspace)
    with pytest.raises(MoKArgumentError) as caught:
        call()
    assert text in str(caught.value)
    assert torch.equal(_device_state(workspace), before), f"something was launched: {text}"


def _refused_weights(seed: int, name: str, as_lists: bool, elements: int, kind: str) -> None:
    """A weight off 16 bytes, after a call with one of the same form that was good. A refusal is the end of a workspace."""
    mok, config, workspace = start(0, 1)
    part = random_part([TOKENS], seed, 0)
    good = {"w13": part.w13, "w2": part.w2}
    if as_lists:
        good = {key: list(w) for key, w in good.items()}
        bad, index = list(good[name]), 5
        bad[index] = _shifted(bad[index], elements)
    else:
        bad, index = _shifted(good[name], elements), 0
    used = {**good, name: bad}
    schedule = mok.build_schedule(workspace, config, part.routes)
    before = _device_state(workspace)
    _, context = mok.forward(config, workspace, schedule, part.x, part.p, **good)
    assert not torch.equal(_device_state(workspace), before)
    calls = {
        "forward": lambda: mok.forward(config, workspace, schedule, part.x, part.p, **used),
        "recompute": lambda: mok.recompute_forward_context(config, workspace, schedule, part.x, part.p, used["w13"]),
        "backward": lambda: mok.backward(config, workspace, schedule, context, part.dy, part.x, part.p, **used),
    }
    _assert_refused(workspace, calls[kind], f"{name}[{index}]: address must be a multiple of 16")
    workspace.close()


def _refused_gradients(seed: int, which: int, as_lists: bool, dtype: torch.dtype) -> None:
    mok, config, workspace = start(0, 1)
    part = random_part([TOKENS], seed, 0)
    weights = (part.w13, part.w2)
    grads: list[Any] = [torch.randn(w.shape, device=w.device).to(dtype) for w in weights]
    index = 6 if as_lists else 0
    if as_lists:
        grads = [list(g) for g in grads]
    schedule = mok.build_schedule(workspace, config, part.routes)
    _, context = mok.forward(config, workspace, schedule, part.x, part.p, *weights)

    def backward() -> None:
        mok.backward(config, workspace, schedule, context, part.dy, part.x, part.p, *weights, main_grads=tuple(grads))

    backward()
    if as_lists:
        grads[which][index] = _shifted(grads[which][index], 1)
    else:
        grads[which] = _shifted(grads[which], 1)
    kept = [torch.stack(g) if as_lists else g.clone() for g in grads]
    _assert_refused(workspace, backward, f"main_grads ({('w13', 'w2')[which]})[{index}]: address ")
    for grad, before in zip(grads, kept, strict=True):
        assert torch.equal(torch.stack(grad) if as_lists else grad, before)
    workspace.close()


def _refuse_all(rank: int, seed: int) -> None:
    for name, as_lists, elements, kind in (
        ("w13", False, 1, "forward"),
        ("w2", False, 4, "forward"),
        ("w13", True, 4, "forward"),
        ("w2", True, 1, "forward"),
        ("w13", True, 1, "recompute"),
        ("w13", False, 4, "backward"),
        ("w2", True, 4, "backward"),
    ):
        _refused_weights(seed, name, as_lists, elements, kind)
    for which, as_lists, dtype in ((0, True, torch.float32), (1, False, torch.float32), (1, True, torch.bfloat16)):
        _refused_gradients(seed, which, as_lists, dtype)


def test_weights_and_gradients_off_16_bytes_are_refused(ranks2: RankPool, seed: int) -> None:
    ranks2.run(_refuse_all, seed, ranks=1, timeout=60)


def _tokens_anywhere(rank: int, ep_size: int, seed: int) -> None:
    mok, config, workspace = start(rank, ep_size)
    part = random_part([TOKENS // ep_size] * ep_size, seed, rank)
    weights = (part.w13, part.w2)

    def run(placed: Part) -> list[torch.Tensor]:
        schedule = mok.build_schedule(workspace, config, placed.routes)
        y, context = mok.forward(config, workspace, schedule, placed.x, placed.p, *weights)
        made = mok.recompute_forward_context(config, workspace, schedule, placed.x, placed.p, part.w13)
        results = [y]
        for ctx in (context, made):
            results += mok.backward(config, workspace, schedule, ctx, placed.dy, placed.x, placed.p, *weights)
        return results

    want = run(part)
    for elements in (1, 4, 7):
        placed = Part(*(_shifted(t, elements) for t in (part.routes, part.x, part.p, part.dy)), *weights)
        assert placed.x.data_ptr() % 16 == 2 * elements % 16
        for index, (one, other) in enumerate(zip(run(placed), want, strict=True)):
            assert_same_bits(f"result {index}", one, other, f"{elements} elements off")
    placed = Part(*(_transposed(t) for t in (part.routes.long(), part.x, part.p, part.dy)), *weights)
    assert not placed.x.is_contiguous()
    for index, (one, other) in enumerate(zip(run(placed), want, strict=True)):
        assert_same_bits(f"result {index}", one, other, "transposed")
    # Weights may move from call to call, and lie behind each other in any order.
    order = torch.randperm(EXPERTS // ep_size).tolist()
    moved = tuple([torch.stack([w[e] for e in order])[order.index(e)] for e in range(len(order))] for w in weights)
    weights = moved
    for index, (one, other) in enumerate(zip(run(part), want, strict=True)):
        other = list(other) if isinstance(one, list) else [other]
        one = one if isinstance(one, list) else [one]
        for a, b in zip(one, other, strict=True):
            assert_same_bits(f"result {index}", a, b, "weights elsewhere")


@pytest.mark.parametrize("ep_size", EP_SIZES)
def test_tokens_may_lie_anywhere(ranks2: RankPool, ep_size: int, seed: int) -> None:
    ranks2.run(_tokens_anywhere, ep_size, seed, ranks=ep_size, timeout=60)
