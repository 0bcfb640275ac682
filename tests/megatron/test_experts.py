"""Where the weights are read, which hooks run first, and which layouts are refused. Stand-ins have the real classes' attributes:
TEGroupedMLP and GroupedMLP need CUDA."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mok_megatron import MoKConfig, MoKUnsupportedError, functional
from mok_megatron.autograd import PlainWeights, routed_experts
from mok_megatron.megatron.experts import WeightReader, call_experts, fire_pre_forward_hooks, read_weights

E, H, I = 3, 64, 128  # noqa: E741 - the symbols of all docstrings


class GroupedLinear(nn.Module):
    """Parameters as Transformer Engine's GroupedLinear has them."""

    def __init__(self, matrices: list[Tensor]) -> None:
        super().__init__()
        for index, matrix in enumerate(matrices):
            self.register_parameter(f"weight{index}", nn.Parameter(matrix.clone()))

    def forward(self, *_: Any) -> None:
        raise AssertionError("never called by the fused experts")


class TEGroupedMLP(nn.Module):
    def __init__(self, w13: Tensor, w2: Tensor) -> None:
        super().__init__()
        self.linear_fc1 = GroupedLinear(list(w13))
        self.linear_fc2 = GroupedLinear(list(w2))


class Linear(nn.Module):
    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(matrix.clone())


class Expert(nn.Module):
    def __init__(self, w13: Tensor, w2: Tensor) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = Linear(w13), Linear(w2)


class SequentialMLP(nn.Module):
    def __init__(self, w13: Tensor, w2: Tensor) -> None:
        super().__init__()
        self.local_experts = nn.ModuleList(Expert(a, b) for a, b in zip(w13, w2, strict=True))


class GroupedMLP(nn.Module):
    """weight1 [H, E*2I] and weight2 [E*I, H], whose memory is E matrices [H, 2I] and [I, H] (megatron-core 0.16)."""

    def __init__(self, w13: Tensor, w2: Tensor) -> None:
        super().__init__()
        hidden = w13.shape[2]
        self.weight1 = nn.Parameter(w13.transpose(1, 2).contiguous().view(hidden, -1))
        self.weight2 = nn.Parameter(w2.transpose(1, 2).contiguous().view(-1, hidden))


MODULES = [SequentialMLP, TEGroupedMLP, GroupedMLP]


def matrices(seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    w13 = torch.randn(E, 2 * I, H, generator=generator) * 0.1
    w2 = torch.randn(E, H, I, generator=generator) * 0.1
    return w13.to(dtype), w2.to(dtype)


def as_tensor(weights: Any) -> Tensor:
    return weights if isinstance(weights, Tensor) else torch.stack(list(weights))


@pytest.mark.parametrize("module", MODULES)
def test_weights_are_read_where_they_lie(module: type[nn.Module]) -> None:
    """D-T2: gate rows 1, up rows 2 and an intermediate size of its own, so that a transpose or a gate/up swap shows."""
    w13, w2 = matrices(1)
    w13[:, :I], w13[:, I:] = 1.0, 2.0
    w13 += torch.arange(E).view(E, 1, 1) * 10
    experts = module(w13, w2)
    bound = read_weights(experts, E)
    got13, got2 = bound.weights()
    assert torch.equal(as_tensor(got13), w13)
    assert torch.equal(as_tensor(got2), w2)
    assert bound.intermediate_size == I
    storages = {p.untyped_storage().data_ptr() for p in experts.parameters()}
    pieces = [t for got in (got13, got2) for t in ([got] if isinstance(got, Tensor) else got)]
    assert {t.untyped_storage().data_ptr() for t in pieces} == storages, "no copy"
    assert set(bound.parameters) == set(experts.parameters())


@pytest.mark.parametrize("module", MODULES)
def test_storage_may_move_between_calls(module: type[nn.Module]) -> None:
    """FSDP re-points parameters at each gather."""
    experts = module(*matrices(1))
    bound = read_weights(experts, E)
    other = module(*matrices(2))
    for parameter, moved in zip(experts.parameters(), other.parameters(), strict=True):
        parameter.data = moved.data
    assert torch.equal(as_tensor(bound.weights()[0]), matrices(2)[0])


def run(experts: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """y, dx, dp and weight gradients, the latter as [E, 2I, H] and [E, H, I]."""
    config = MoKConfig()
    workspace = functional.get_workspace(
        config,
        None,
        device="cpu",
        num_local_tokens=40,
        hidden_size=H,
        topk=2,
        num_local_experts=E,
        intermediate_size=I,
        dtype=dtype,
    )
    generator = torch.Generator().manual_seed(5)
    routes = torch.stack([torch.randperm(2, generator=generator) for _ in range(40)]).sort(dim=1).values
    x = torch.randn(40, H, generator=generator).to(dtype).requires_grad_(True)
    p = torch.rand(40, 2, generator=generator).requires_grad_(True)
    schedule = functional.build_schedule(workspace, config, routes)
    binding = experts if isinstance(experts, PlainWeights) else read_weights(experts, E)
    y = routed_experts(config, workspace, schedule, x, p, binding)
    y.backward(torch.randn(40, H, generator=generator).to(dtype))
    return {"y": y.detach(), "dx": x.grad, "dp": p.grad}


def as_matrices(experts: nn.Module, attribute: str) -> tuple[Tensor, Tensor]:
    """A per-parameter attribute as [E, 2I, H] and [E, H, I]."""
    bound = read_weights(experts, E)
    kinds = []
    for parameters, view in zip((bound.fc1, bound.fc2), bound.view, strict=True):
        pieces = [view(getattr(p, attribute)) for p in parameters]
        kinds.append(pieces[0] if bound.stacked else torch.stack(pieces))
    return kinds[0], kinds[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_layouts_give_the_same_bits(dtype: torch.dtype) -> None:
    w13, w2 = matrices(3, dtype)
    plain = PlainWeights(w13.clone().requires_grad_(True), w2.clone().requires_grad_(True))
    expected = run(plain, dtype)
    for module in MODULES:
        experts = module(w13, w2)
        for name, value in run(experts, dtype).items():
            assert torch.equal(value, expected[name]), (module, name)
        dw13, dw2 = as_matrices(experts, "grad")
        assert torch.equal(dw13, plain.w13.grad) and torch.equal(dw2, plain.w2.grad), module
        assert not dw13[2].any(), "a cold expert's gradient is zero, not absent"


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("module", MODULES)
def test_main_grad_of_every_layout(module: type[nn.Module], overwrite: bool) -> None:
    """B-T3: prefilled with 7 (NaN where it is overwritten), expert 2 is cold."""
    w13, w2 = matrices(3)
    reference = module(w13, w2)
    run(reference, torch.float32)
    experts = module(w13, w2)
    for parameter in experts.parameters():
        parameter.main_grad = torch.full(parameter.shape, float("nan") if overwrite else 7.0)
        parameter.grad_added_to_main_grad = False
        parameter.overwrite_main_grad = overwrite
    run(experts, torch.float32)
    for got, wanted in zip(as_matrices(experts, "main_grad"), as_matrices(reference, "grad"), strict=True):
        cold = torch.zeros(1) if overwrite else torch.full((1,), 7.0)
        assert torch.equal(got[2], cold.expand_as(got[2]))
        assert torch.equal(got, wanted if overwrite else wanted + 7.0)
    for parameter in experts.parameters():
        assert parameter.grad_added_to_main_grad is True
        assert parameter.grad is not None and parameter.grad.shape == parameter.shape


def test_hooks_of_every_submodule_run_before_the_weights_are_read() -> None:
    """The stand-in for --overlap-param-gather: a hook brings the weights of the modules' own parameters."""
    for module in MODULES:
        w13, w2 = matrices(4)
        experts = module(w13 * 0, w2 * 0)
        fresh = module(w13, w2)
        order: list[str] = []
        sources = dict(fresh.named_modules())

        def gather(hooked: nn.Module, *unused: Any, name: str, sources: Any = sources, order: list[str] = order) -> None:
            order.append(name)
            for parameter, source in zip(hooked.parameters(recurse=False), sources[name].parameters(recurse=False), strict=True):
                parameter.data.copy_(source.data)

        for name, submodule in experts.named_modules():
            submodule.register_forward_pre_hook(lambda m, *a, name=name, gather=gather: gather(m, *a, name=name))
        seen: list[Tensor] = []

        def compute(x: Tensor, experts: nn.Module = experts, seen: list[Tensor] = seen) -> Tensor:
            seen.append(as_tensor(read_weights(experts, E).weights()[0]).clone())
            return x

        call_experts(experts, compute, torch.ones(1))
        assert order == [name for name, _ in experts.named_modules()]
        assert torch.equal(seen[0], w13)
        assert "forward" not in vars(experts), "nothing is left on the module"


def test_hooks_that_want_keywords_or_change_the_input() -> None:
    module = nn.Linear(2, 2)
    seen: list[Any] = []
    module.register_forward_pre_hook(lambda m, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    fire_pre_forward_hooks(module)
    assert seen == [((), {})]
    module.register_forward_pre_hook(lambda m, args: (torch.zeros(1),))
    with pytest.raises(MoKUnsupportedError, match="pre-forward hook of Linear changes its input"):
        fire_pre_forward_hooks(module)


def test_the_modules_own_hooks_see_the_call_and_errors_leave_nothing_behind() -> None:
    experts = SequentialMLP(*matrices(1))
    seen: list[Any] = []
    experts.register_forward_pre_hook(lambda m, args: seen.append(args[0].item()))
    experts.register_forward_hook(lambda m, args, output: seen.append(output.item()))
    assert call_experts(experts, lambda x: x + 1, torch.tensor(1.0)).item() == 2.0
    assert seen == [1.0, 2.0]
    with pytest.raises(ZeroDivisionError):
        call_experts(experts, lambda x: 1 / 0, torch.tensor(1.0))
    assert "forward" not in vars(experts)
    theirs = lambda *args: None  # noqa: E731 - somebody's replacement of the module's forward
    experts.forward = theirs
    call_experts(experts, lambda x: x, torch.tensor(1.0))
    assert experts.forward is theirs


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.to_wrap = base
        self.adapter = nn.Linear(2, 2, bias=False)


def test_wrapped_experts_are_refused_with_both_patterns() -> None:
    """D-T2 and F-T5 (LoRA on experts)."""
    experts = SequentialMLP(*matrices(1))
    experts.local_experts[1].linear_fc1 = LoRALinear(experts.local_experts[1].linear_fc1)
    with pytest.raises(MoKUnsupportedError) as error:
        read_weights(experts, E)
    text = str(error.value)
    assert "Expected for 3 local experts one of: local_experts.{i}.linear_fc1.weight" in text
    assert "linear_fc1.weight{i}" in text and "weight1, weight2" in text
    assert "Found: local_experts.0.linear_fc1.weight" in text
    assert "local_experts.1.linear_fc1.to_wrap.weight" in text
    assert "LoRA" in text


def test_bias_and_wrong_counts_are_refused() -> None:
    experts = TEGroupedMLP(*matrices(1))
    with pytest.raises(MoKUnsupportedError, match="Expected for 4 local experts"):
        read_weights(experts, 4)
    experts.linear_fc1.register_parameter("bias0", nn.Parameter(torch.zeros(2 * I)))
    with pytest.raises(MoKUnsupportedError, match=r"linear_fc1.bias0.*Expert bias"):
        read_weights(experts, E)
    single = nn.Module()
    single.linear_fc1, single.linear_fc2 = Linear(matrices(1)[0]), Linear(matrices(1)[1])
    with pytest.raises(MoKUnsupportedError, match="single grouped weights are not supported"):
        read_weights(single, E)


def test_sharded_and_quantised_parameters_are_refused() -> None:
    class DTensor(nn.Parameter):
        def to_local(self) -> Tensor:
            raise AssertionError

    class MXFP8Tensor(nn.Parameter):
        _rowwise_data = None

    for kind, text in ((DTensor, "--use-torch-fsdp2"), (MXFP8Tensor, "--fp8-param-gather")):
        experts = TEGroupedMLP(*matrices(1))
        experts.linear_fc2.weight1 = kind(experts.linear_fc2.weight1.data)
        with pytest.raises(MoKUnsupportedError) as error:
            read_weights(experts, E)
        assert text in str(error.value) and "experts.linear_fc2.weight1" in str(error.value)


@pytest.mark.parametrize("module", MODULES)
def test_a_reader_sees_what_was_replaced_since_its_last_call(module: type[nn.Module]) -> None:
    experts, reader = module(*matrices(1)), WeightReader()
    first = reader.read(experts, E)
    assert reader.read(experts, E) is first
    owner = [m for m in experts.modules() if m._parameters][-1]
    name = next(iter(owner._parameters))
    replaced = nn.Parameter(owner._parameters[name].detach().clone())
    setattr(owner, name, replaced)
    assert any(p is replaced for p in reader.read(experts, E).parameters)
    # A wrapper may bring a table of its own.
    third = nn.Parameter(replaced.detach().clone())
    owner.__dict__["_parameters"] = {**owner._parameters, name: third}
    assert any(p is third for p in reader.read(experts, E).parameters)
    other = module(*matrices(2))
    assert set(reader.read(other, E).parameters) == set(other.parameters())
    owner.register_parameter("bias", nn.Parameter(torch.zeros(1)))
    with pytest.raises(MoKUnsupportedError):
        reader.read(experts, E)


def test_a_reader_sees_a_wrapped_module_and_is_not_copied() -> None:
    experts, reader = SequentialMLP(*matrices(1)), WeightReader()
    reader.read(experts, E)
    for made in (copy.deepcopy(reader), pickle.loads(pickle.dumps(reader))):
        assert made._weights is None and not made._entries
    experts.local_experts[1].linear_fc1 = LoRALinear(experts.local_experts[1].linear_fc1)
    with pytest.raises(MoKUnsupportedError, match="LoRA"):
        reader.read(experts, E)
