"""Calls on their way to the GPU, as far as the host goes: what the kernels are told, what is refused, and what a call allocates."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mok_megatron import MoKArgumentError, MoKConfig, MoKError, functional, known_tensors
from mok_megatron.autograd import PlainWeights, routed_experts
from mok_megatron.protocol import FATAL_RECORD, CallKind, PassTag
from mok_megatron.schedule import MoKSchedule
from tests.cpu.device_stub import EXPERTS, HIDDEN, INNER, TOKENS, TOPK, StubDevice, host_workspace, stub_device

Operands = dict[str, Any]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> StubDevice:
    return stub_device(monkeypatch)


def _matrices(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(sizes).to(dtype)) for _ in range(EXPERTS)]


def _operands(seed: int) -> Operands:
    """Of a backward; weights and gradients are lists of single tensors."""
    torch.manual_seed(seed)
    return {
        "x": torch.randn(TOKENS, HIDDEN).bfloat16(),
        "router_weights": torch.rand(TOKENS, TOPK),
        "w13": _matrices(2 * INNER, HIDDEN),
        "w2": _matrices(HIDDEN, INNER),
        "dy": torch.randn(TOKENS, HIDDEN).bfloat16(),
        "main_grads": (
            [torch.randn(2 * INNER, HIDDEN) for _ in range(EXPERTS)],
            [torch.randn(HIDDEN, INNER) for _ in range(EXPERTS)],
        ),
        "overwrite_main_grads": (False, [True, False] * (EXPERTS // 2)),
    }


def _routes() -> torch.Tensor:
    return torch.rand(TOKENS, EXPERTS).argsort(1)[:, :TOPK].contiguous()


def _calls(config: Any, workspace: Any, o: Operands, *, backward: bool = True) -> None:
    schedule = functional.build_schedule(workspace, config, o["topk_experts"] if "topk_experts" in o else _routes())
    forward = (config, workspace, schedule, o["x"], o["router_weights"], o["w13"], o["w2"])
    _, context = functional.forward(*forward)
    if not backward:
        return
    grads = {name: o[name] for name in ("main_grads", "overwrite_main_grads")}
    functional.backward(config, workspace, schedule, o.get("ctx", context), o["dy"], *forward[3:], **grads)


def _pointers(tensors: Any) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def test_words_of_a_schedule_and_a_forward(device: StubDevice, seed: int) -> None:
    o, routes = _operands(seed), _routes()
    schedule = functional.build_schedule(device.workspace, device.config, routes)
    words = device.last.words
    assert (words["num_tokens"], words["wide_ids"], words["topk_experts"]) == (TOKENS, 1, routes.data_ptr())
    capacity = device.workspace.capacity_rows
    for name, word, sizes, dtype in (
        ("row_source_rank", "row_source_rank", (capacity,), torch.int32),
        ("row_source_slot", "row_source_slot", (capacity,), torch.int32),
        ("expert_rows", "expert_rows", (EXPERTS,), torch.int32),
        ("expert_row_offsets", "expert_row_offsets", (EXPERTS + 1,), torch.int64),
        ("num_rows", "num_rows", (1,), torch.int64),
        ("topk_experts", "own_routes", (TOKENS, TOPK), torch.int32),
    ):
        table = getattr(schedule, name)
        assert (table.shape, table.dtype, table.data_ptr()) == (sizes, dtype, words[word]), name
        # No two tables share memory: what is written to one is read from it after all others were written.
        table.fill_(len(name))
    assert all(bool((getattr(schedule, n) == len(n)).all()) for n in ("row_source_rank", "expert_rows", "expert_row_offsets", "num_rows"))
    assert bool((schedule.row_source_slot == len("row_source_slot")).all() and (schedule.topk_experts == len("topk_experts")).all())

    y, context = functional.forward(device.config, device.workspace, schedule, o["x"], o["router_weights"], o["w13"], o["w2"])
    words = device.last.words
    for name in ("row_source_rank", "row_source_slot", "expert_rows", "expert_row_offsets", "topk_experts"):
        assert words[name] == getattr(schedule, name).data_ptr()
    assert [words[n] for n in ("x", "router_weights", "y")] == _pointers((o["x"], o["router_weights"], y))
    assert [words["x_rows"], words["gate_up"]] == _pointers(context.tensors())
    assert device.last.tables == [_pointers(o["w13"]), _pointers(o["w2"])]
    stacked = torch.stack(list(o["w13"])), torch.stack(list(o["w2"]))
    functional.forward(device.config, device.workspace, schedule, o["x"], o["router_weights"], *stacked, save_context=False)
    assert device.last.tables == [_pointers(w) for w in stacked] and device.last.words["gate_up"] == 0
    assert device.last.words["timeout_nanoseconds"] == int(device.config.timeout_seconds * 1e9)


@pytest.mark.parametrize("overwrite", [False, True, [False] * EXPERTS, [True] * EXPERTS, [False, True] * (EXPERTS // 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["lists", "stacked", "some", "one"])
def test_words_of_a_backward(device: StubDevice, seed: int, form: str, dtype: torch.dtype, overwrite: Any) -> None:
    o = _operands(seed)
    o["overwrite_main_grads"] = (overwrite, overwrite)
    for _ in range(2):  # of an unknown form, and of a known one
        one, two = ([torch.randn(w.shape).to(dtype) for w in o[name]] for name in ("w13", "w2"))
        if form == "stacked":
            one, two = torch.stack(one), torch.stack(two)
        elif form == "some":
            one[1] = two[0] = None
        elif form == "one":
            one = None
        o["main_grads"] = (one, two)
        _calls(device.config, device.workspace, o)
        flags = [1 * flag + 2 * (dtype == torch.bfloat16) for flag in ([overwrite] * EXPERTS if isinstance(overwrite, bool) else overwrite)]
        want = [
            [0 if g is None else g.data_ptr() + flag for g, flag in zip([None] * EXPERTS if grads is None else grads, flags, strict=True)]
            for grads in (one, two)
        ]
        assert device.last.name == "mok_sm90_backward"
        assert device.last.tables == [_pointers(o["w13"]), _pointers(o["w2"]), *want]


def test_addresses_are_read_at_every_call(device: StubDevice, seed: int) -> None:
    o = _operands(seed)
    kept = []
    for _ in range(3):
        _calls(device.config, device.workspace, o)
        assert device.last.tables[0] == _pointers(o["w13"]) and device.last.tables[2] == _pointers(o["main_grads"][0])
        kept.append(device.last.tables)
        for tensor in (*o["w13"], *o["main_grads"][0]):
            # The old storage stays, so that no new one comes to lie at its address.
            kept.append(tensor.data)
            tensor.data = tensor.data.clone()
    assert kept[0][0] != device.last.tables[0]


# What happens to a tensor that was in a good call already.
CHANGES: dict[str, Callable[[torch.Tensor], None]] = {
    "shape": lambda t: setattr(t, "data", t.data[:, :-1].clone()),
    "swapped": lambda t: setattr(t, "data", t.data.t().contiguous()),
    "view of the same address": lambda t: setattr(t, "data", t.data.view(t.shape[1], t.shape[0])),
    "narrow view of the same address": lambda t: setattr(t, "data", t.data[:, : t.shape[1] // 2]),
    "dtype": lambda t: setattr(t, "data", t.data.half()),
    "dtype at the same address": lambda t: setattr(t, "data", t.data.view(torch.float16 if t.dtype == torch.bfloat16 else torch.int32)),
    "strides": lambda t: setattr(t, "data", t.data.t().contiguous().t()),
    "emptied": lambda t: setattr(t, "data", t.data.new_empty(0)),
    "transposed in place": torch.no_grad()(lambda t: t.t_()),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["w13", "w2", "main_grads (w13)", "main_grads (w2)"])
def test_a_known_list_is_looked_at_again(device: StubDevice, seed: int, name: str, change: str) -> None:
    o = _operands(seed)
    lists = {"w13": o["w13"], "w2": o["w2"], "main_grads (w13)": o["main_grads"][0], "main_grads (w2)": o["main_grads"][1]}
    for _ in range(2):
        _calls(device.config, device.workspace, o)
    assert device.workspace.known_tensors[name].match(lists[name])
    CHANGES[change](lists[name][2])
    launches = len(device.library.launches)
    with pytest.raises(MoKArgumentError) as raised:
        _calls(device.config, device.workspace, o)
    assert str(raised.value).startswith(f"{name}[2]: "), raised.value
    assert launches < len(device.library.launches) <= launches + 2 and device.last.name != "mok_sm90_backward"


def test_an_entry_of_a_known_list_is_exchanged(device: StubDevice, seed: int) -> None:
    o = _operands(seed)
    _calls(device.config, device.workspace, o)
    o["w13"][1] = o["w13"][1].detach()[::2].repeat(2, 1)  # another type, and good
    _calls(device.config, device.workspace, o)
    assert device.last.tables[0] == _pointers(o["w13"])
    o["main_grads"][0][3] = o["main_grads"][0][0]
    with pytest.raises(MoKArgumentError, match="must not share memory"):
        _calls(device.config, device.workspace, o)


def test_gradients_at_one_address_in_two_tensors(device: StubDevice, seed: int) -> None:
    o = _operands(seed)
    _calls(device.config, device.workspace, o)
    o["main_grads"][1][3].data = o["main_grads"][1][2].data
    with pytest.raises(MoKArgumentError, match="must not share memory"):
        _calls(device.config, device.workspace, o)


def test_a_gradient_off_its_16_bytes(device: StubDevice, seed: int) -> None:
    o = _operands(seed)
    _calls(device.config, device.workspace, o)
    o["main_grads"][1][1].data = torch.randn(HIDDEN * INNER + 1)[1:].view(HIDDEN, INNER)
    with pytest.raises(MoKArgumentError, match=r"main_grads \(w2\)\[1\]: address .* multiple of 16"):
        _calls(device.config, device.workspace, o)


def test_without_torchs_guards_every_list_is_checked(device: StubDevice, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_tensors, "TensorGuards", None)
    o = _operands(seed)
    for _ in range(2):
        _calls(device.config, device.workspace, o)
        assert device.last.tables[:2] == [_pointers(o["w13"]), _pointers(o["w2"])]
    assert not device.workspace.known_tensors["w13"].match(o["w13"])


# What is refused on the CPU is refused on a GPU in the same words, in the same order where two things are wrong.
FAULTS: dict[str, Callable[[Operands], None]] = {
    "x": lambda o: o.update(x=o["x"][:-1]),
    "x-sparse": lambda o: o.update(x=o["x"].to_sparse()),
    "router_weights": lambda o: o.update(router_weights=o["router_weights"].double()),
    "dy": lambda o: o.update(dy=o["dy"].float()),
    "routes-type": lambda o: o.update(topk_experts=[1]),
    "routes-dim": lambda o: o.update(topk_experts=torch.zeros(TOKENS, dtype=torch.int64)),
    "routes-dtype": lambda o: o.update(topk_experts=torch.zeros(TOKENS, TOPK)),
    "routes-width": lambda o: o.update(topk_experts=torch.zeros(TOKENS, TOPK + 1, dtype=torch.int64)),
    "routes-count": lambda o: o.update(topk_experts=torch.zeros(TOKENS + 1, TOPK, dtype=torch.int64)),
    "w13-count": lambda o: o.update(w13=o["w13"][:-1]),
    "w13-type": lambda o: o.update(w13=7),
    "w13-entry": lambda o: o["w13"].__setitem__(2, o["w13"][2].detach().t()),
    "w13-stacked": lambda o: o.update(w13=torch.randn(EXPERTS, INNER, HIDDEN).bfloat16()),
    "w2-none": lambda o: o["w2"].__setitem__(1, None),
    "w2-dtype": lambda o: o.update(w2=[w.detach().float() for w in o["w2"]]),
    "w13-and-w2": lambda o: o.update(w13=o["w13"][:1], w2=o["w2"][:1]),
    "ctx": lambda o: o.update(ctx="no"),
    "grads-pair": lambda o: o.update(main_grads=o["main_grads"][:1]),
    "grads-type": lambda o: o.update(main_grads=5),
    "grads-entry": lambda o: o["main_grads"][1].__setitem__(0, torch.randn(HIDDEN, HIDDEN)),
    "grads-dtype": lambda o: o["main_grads"][0].__setitem__(0, torch.randn(2 * INNER, HIDDEN).half()),
    "overwrite-type": lambda o: o.update(overwrite_main_grads=(1, False)),
    "overwrite-count": lambda o: o.update(overwrite_main_grads=(False, [True])),
    "overwrite-entry": lambda o: o.update(overwrite_main_grads=([0] * EXPERTS, True)),
    "overwrite-pair": lambda o: o.update(overwrite_main_grads=True),
    "grads-shared": lambda o: o["main_grads"][0].__setitem__(0, o["main_grads"][0][1]),
    "grads-expanded": lambda o: o.update(main_grads=(torch.randn(1, 2 * INNER, HIDDEN).expand(EXPERTS, -1, -1), None)),
    "grads-and-overwrite": lambda o: o.update(main_grads=(o["main_grads"][0][:2], None), overwrite_main_grads=("a", "b")),
}


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_refused_as_on_the_host(device: StubDevice, seed: int, fault: str, known: bool) -> None:
    texts = []
    for workspace in (host_workspace(), device.workspace):
        if known:
            _calls(device.config, workspace, _operands(seed))
        bad = _operands(seed)
        FAULTS[fault](bad)
        with pytest.raises(MoKArgumentError) as raised:
            _calls(device.config, workspace, bad)
        texts.append(str(raised.value))
    assert texts[0] == texts[1]
    with pytest.raises(MoKError, match="cannot be used after"):
        _calls(device.config, device.workspace, _operands(seed))


@pytest.mark.parametrize("name", ["w13", "w2"])
@pytest.mark.parametrize("stacked", [False, True])
def test_weights_that_are_not_contiguous(device: StubDevice, seed: int, name: str, stacked: bool) -> None:
    o = _operands(seed)
    matrices = [w.detach().t().contiguous().t() for w in o[name]]
    o[name] = torch.stack([m.t() for m in matrices]).transpose(1, 2) if stacked else matrices
    with pytest.raises(MoKArgumentError, match=rf"^{name}\[0\]: strides .* contiguous matrix on a GPU"):
        _calls(device.config, device.workspace, o, backward=False)


def test_a_config_of_other_sizes_is_refused_after_a_good_one(device: StubDevice, seed: int) -> None:
    o = _operands(seed)
    _calls(device.config, device.workspace, o, backward=False)
    with pytest.raises(MoKArgumentError, match=r"config\.minibatch_size=256"):
        functional.build_schedule(device.workspace, dataclasses.replace(device.config, minibatch_size=256), _routes())


def test_a_refusal_is_told_to_the_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    device = stub_device(monkeypatch, ep_size=2)
    with pytest.raises(MoKArgumentError, match="topk_experts") as raised:
        functional.build_schedule(device.workspace, device.config, _routes()[:, :1])
    text = bytes(device.workspace.buffers[1].flags.texts[0, FATAL_RECORD].tolist()).rstrip(b"\0").decode()
    assert text == str(raised.value)


def test_a_bad_route_that_the_kernels_found_is_told_to_the_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    device = stub_device(monkeypatch, ep_size=2)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    functional.build_schedule(device.workspace, device.config, _routes())
    # What the kernels write: code 3, call 1, and in the details the kind of the fault, token, slot and expert.
    for word, value in ((2, 1), (8, 1), (9, 1), (10, 0), (11, 99), (0, 3)):
        device.workspace.executor.fault[word] = value
    with pytest.raises(MoKArgumentError, match=r"schedule of .*topk_experts\[1, 0\]=99: must be -1 or in") as raised:
        functional.build_schedule(device.workspace, device.config, _routes())
    text = bytes(device.workspace.buffers[1].flags.texts[0, FATAL_RECORD].tolist()).rstrip(b"\0").decode()
    assert text == str(raised.value)


def test_a_bad_route_is_raised_also_where_the_peers_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    device = stub_device(monkeypatch, ep_size=2)

    def no_stream(_: Any) -> None:
        raise RuntimeError("CUDA error: a stream is being captured")

    monkeypatch.setattr(torch.cuda, "Stream", no_stream)
    functional.build_schedule(device.workspace, device.config, _routes())
    for word, value in ((2, 1), (8, 2), (9, 1), (10, 0), (11, 1), (0, 3)):
        device.workspace.executor.fault[word] = value
    with pytest.raises(MoKArgumentError, match=r"topk_experts\[1, 0\]=1: must not repeat"):
        functional.build_schedule(device.workspace, device.config, _routes())


def test_a_launch_is_on_the_workspaces_device_wherever_the_thread_is(device: StubDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []
    monkeypatch.setattr(torch.cuda, "device", lambda d: entered.append(d) or contextlib.nullcontext())
    functional.build_schedule(device.workspace, device.config, _routes())
    assert not entered
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 3)
    functional.build_schedule(device.workspace, device.config, _routes())
    assert entered == [device.workspace.device]


def test_a_launch_that_fails_is_fatal(device: StubDevice) -> None:
    device.library.code = 700
    with pytest.raises(MoKError, match="mok_sm90_schedule failed with CUDA error 700"):
        functional.build_schedule(device.workspace, device.config, _routes())
    with pytest.raises(MoKError, match="cannot be used after"):
        functional.build_schedule(device.workspace, device.config, _routes())


@pytest.mark.parametrize(("code", "name"), [(100_000, r"w13\[0\]"), (101_003, r"w2\[3\]")])
def test_a_weight_that_does_not_lie_on_16_bytes_is_named(device: StubDevice, seed: int, code: int, name: str) -> None:
    o = _operands(seed)
    schedule = functional.build_schedule(device.workspace, device.config, _routes())
    device.library.code = code
    with pytest.raises(MoKArgumentError, match=f"{name}: address must be a multiple of 16"):
        functional.forward(device.config, device.workspace, schedule, o["x"], o["router_weights"], o["w13"], o["w2"])


def test_rows_that_do_not_lie_on_16_bytes_are_moved(device: StubDevice, seed: int) -> None:
    o = _operands(seed)
    schedule = functional.build_schedule(device.workspace, device.config, _routes())
    memory = torch.empty(o["x"].numel() + 1, dtype=o["x"].dtype)
    odd = memory[1:].view_as(o["x"])
    odd.copy_(o["x"])
    assert odd.data_ptr() % 16
    functional.forward(device.config, device.workspace, schedule, odd, o["router_weights"], o["w13"], o["w2"])
    assert device.last.words["x"] % 16 == 0


@pytest.mark.parametrize(
    ("knobs", "rule"),
    [
        ({"bwd_num_comm_sms": 24}, "bwd_num_comm_sms=24: must be 0 or None"),
        ({"sm_reserve": 131}, "sm_reserve=131: must leave a pair of the GPU's 132 SMs"),
        ({"fwd_num_comm_sms": 99, "sm_reserve": 32}, "fwd_num_comm_sms=99, sm_reserve=32: must leave a pair"),
    ],
)
def test_a_config_that_leaves_no_sms_is_refused(device: StubDevice, knobs: dict[str, int], rule: str) -> None:
    with pytest.raises(MoKArgumentError, match=rule):
        functional.build_schedule(device.workspace, MoKConfig(**knobs), _routes())
    assert not device.library.launches


@pytest.mark.parametrize("knobs", [{"bwd_num_comm_sms": 0}, {"sm_reserve": 130}, {"fwd_num_comm_sms": 97, "sm_reserve": 32}])
def test_a_config_that_leaves_sms_is_not_refused(device: StubDevice, knobs: dict[str, int]) -> None:
    functional.build_schedule(device.workspace, MoKConfig(**knobs), _routes())
    assert device.library.launches


def test_calls_are_found_by_number(device: StubDevice) -> None:
    for layer in range(3):
        functional.build_schedule(device.workspace, device.config, _routes(), tag=PassTag(layer, 7))
    log = device.workspace.call_log
    found = log.find(2)
    assert (found.kind, found.tag, found.limit_seconds) == (CallKind.SCHEDULE, PassTag(1, 7), device.config.timeout_seconds)
    assert log.find(4) is None and log.find(2 + 4096) is None
    for _ in range(4096):
        log.add(CallKind.FORWARD, PassTag(), 1.0)
    assert log.find(3) is None and log.find(4).kind == CallKind.FORWARD


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function._schema.name)
        return function(*args, **(kwargs or {}))


def test_a_call_makes_its_outputs_and_no_other_tensor(device: StubDevice, seed: int) -> None:
    """The host's time is the number of operators first of all: nothing but the results is made."""
    o, routes = _operands(seed), _routes()
    _calls(device.config, device.workspace, o)
    with _Operators() as mode:
        schedule = functional.build_schedule(device.workspace, device.config, routes)
    assert mode.names == ["aten::empty"]
    forward = (device.config, device.workspace, schedule, o["x"], o["router_weights"], o["w13"], o["w2"])
    with _Operators() as mode:
        functional.forward(*forward, save_context=False)
    assert mode.names == ["aten::empty_like"]
    with _Operators() as mode:
        _, context = functional.forward(*forward)
    assert sorted(mode.names) == ["aten::empty", "aten::empty", "aten::empty_like"]
    with _Operators() as mode:
        functional.backward(*forward[:3], context, o["dy"], *forward[3:], main_grads=o["main_grads"])
    assert mode.names == ["aten::empty_like"] * 2


def test_autograd_saves_the_schedules_one_memory(device: StubDevice, seed: int) -> None:
    o = _operands(seed)
    schedule = functional.build_schedule(device.workspace, device.config, _routes())
    x = o["x"].requires_grad_()
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        saved.append(tensor)
        return len(saved) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda index: saved[index].clone()):
        y = routed_experts(device.config, device.workspace, schedule, x, o["router_weights"], PlainWeights(o["w13"], o["w2"]))
    assert [t.dtype for t in saved] == [torch.bfloat16, torch.float32, torch.int32, torch.bfloat16, torch.bfloat16]
    before = device.last.words["row_source_rank"]
    y.backward(o["dy"])
    assert device.last.name == "mok_sm90_backward" and device.last.words["num_tokens"] == TOKENS
    # The tables lie in what the hook gave back, with the same distances.
    distance = device.last.words["topk_experts"] - device.last.words["row_source_rank"]
    assert device.last.words["row_source_rank"] != before and distance == schedule.topk_experts.data_ptr() - before


def test_a_schedule_comes_apart_and_together(device: StubDevice) -> None:
    packed = functional.build_schedule(device.workspace, device.config, _routes())
    packed.memory.copy_(torch.arange(len(packed.memory)))
    tensors, join = packed.split()
    names = ("row_source_rank", "row_source_slot", "expert_rows", "expert_row_offsets", "num_rows", "topk_experts")
    plain = MoKSchedule(packed.num_tokens, *(getattr(packed, name) for name in names))
    assert plain.sizes == packed.sizes and plain.addresses() == packed.addresses()
    other, join_plain = plain.split()
    for again in (join(*tensors), join_plain(*other)):
        assert again.num_tokens == TOKENS and all(torch.equal(getattr(again, name), getattr(packed, name)) for name in names)
