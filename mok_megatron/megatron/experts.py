"""The stock experts module as the owner of the weights: which tensors hold them, and the hooks that must run before they are read.

E_local local experts, H hidden (the latent size where there is one), I expert intermediate. Three layouts are read where they lie:

* one linear an expert (SequentialMLP): ``local_experts.{i}.linear_fc1.weight`` [2I, H], ``.linear_fc2.weight`` [H, I];
* grouped linear (TEGroupedMLP): ``linear_fc1.weight{i}`` [2I, H], ``linear_fc2.weight{i}`` [H, I];
* legacy grouped (GroupedMLP of megatron-core 0.16): ``weight1`` [H, E_local*2I], whose memory is E_local matrices [H, 2I], and
  ``weight2`` [E_local*I, H]. Handed over as transposed views [E_local, 2I, H] and [E_local, H, I]: no copy, no twin.

Gate rows come before up rows in all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from mok_megatron.errors import MoKUnsupportedError
from mok_megatron.megatron import fsdp
from mok_megatron.megatron.gradients import ExpertGradients, View

if TYPE_CHECKING:
    from mok_megatron.autograd import Weights  # loads the compiled library

LAYOUTS = (
    "local_experts.{i}.linear_fc1.weight, local_experts.{i}.linear_fc2.weight",
    "linear_fc1.weight{i}, linear_fc2.weight{i}",
    "weight1, weight2",
)
"""Parameter names of the layouts that are understood."""


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class ExpertWeights:
    """Implements :class:`mok_megatron.autograd.WeightBinding` for the experts module of an MoE layer."""

    fc1: tuple[Tensor, ...]
    fc2: tuple[Tensor, ...]
    view: tuple[View, View] = (_as_it_is, _as_it_is)
    stacked: bool = False

    @functools.cached_property
    def parameters(self) -> tuple[Tensor, ...]:
        return (*self.fc1, *self.fc2)

    def weights(self) -> tuple[Weights, Weights]:
        """(w13, w2): the parameters themselves, or views of their present storage. For use where no graph is recorded."""
        if not self.stacked:
            return self.fc1, self.fc2
        w13, w2 = (v(p.detach()) for (p,), v in zip((self.fc1, self.fc2), self.view, strict=True))
        return w13, w2

    def open_gradients(self) -> ExpertGradients:
        return ExpertGradients(self.fc1, self.fc2, self.view, self.stacked)

    @functools.cached_property
    def intermediate_size(self) -> int:
        """I."""
        w13 = self.view[0](self.fc1[0].detach())
        return w13.shape[-2] // 2


class WeightReader:
    """Reads the weights of one experts module at each call: wrappers may replace parameters and modules.

    Names are looked at once; later calls only make sure that every module and parameter is still the one in its place. A copy or a
    pickle of it has read nothing.
    """

    def __init__(self) -> None:
        self._weights: ExpertWeights | None = None
        self._experts: nn.Module | None = None
        self._tables: list[tuple[nn.Module, dict[str, Any], dict[str, Any], int]] = []
        self._entries: list[tuple[dict[str, Any], str, Any]] = []

    def __reduce__(self) -> tuple[type[WeightReader], tuple[()]]:
        return WeightReader, ()

    def read(self, experts: nn.Module, num_local_experts: int) -> ExpertWeights:
        """As :func:`read_weights`."""
        if self._weights is None or self._experts is not experts or not self._holds():
            self._weights, self._experts = read_weights(experts, num_local_experts), experts
            self._tables = [(m, m._modules, m._parameters, len(m._modules) + len(m._parameters)) for m in experts.modules()]
            self._entries = [(table, key, value) for _, *tables, _ in self._tables for table in tables for key, value in table.items()]
        return self._weights

    def _holds(self) -> bool:
        """Whether nothing was added, taken away or replaced."""
        for module, modules, parameters, size in self._tables:
            if module._modules is not modules or module._parameters is not parameters or len(modules) + len(parameters) != size:
                return False
        for table, key, value in self._entries:  # noqa: SIM110 - at each call, and all() takes twice as long
            if table.get(key) is not value:
                return False
        return True


def read_weights(experts: nn.Module, num_local_experts: int) -> ExpertWeights:
    """The weights of a stock experts module.

    Raises:
        MoKUnsupportedError: the module has parameters other than those of one of :data:`LAYOUTS` (bias, adapters, shards).
    """
    found = dict(experts.named_parameters())
    count = num_local_experts
    if _has_exactly(found, names := _names("local_experts.{}.linear_fc{}.weight", count)) or _has_exactly(
        found, names := _names("linear_fc{1}.weight{0}", count)
    ):
        bound = ExpertWeights(tuple(found[n] for n in names[:count]), tuple(found[n] for n in names[count:]))
    elif _has_exactly(found, ["weight1", "weight2"]):
        bound = _legacy_grouped(found["weight1"], found["weight2"], count)
    else:
        raise MoKUnsupportedError(_unknown_layout(experts, found, count))
    for name, parameter in found.items():
        fsdp.require_plain_tensor(f"experts.{name}", parameter)
    return bound


@functools.cache
def _names(pattern: str, count: int) -> list[str]:
    return [pattern.format(i, fc) for fc in (1, 2) for i in range(count)]


def _has_exactly(found: dict[str, nn.Parameter], names: list[str]) -> bool:
    return len(found) == len(names) and all(name in found for name in names)


def _legacy_grouped(weight1: Tensor, weight2: Tensor, count: int) -> ExpertWeights:
    hidden = weight1.shape[0]

    def view_fc1(tensor: Tensor) -> Tensor:
        return tensor.view(count, hidden, -1).transpose(1, 2)

    def view_fc2(tensor: Tensor) -> Tensor:
        return tensor.view(count, -1, hidden).transpose(1, 2)

    return ExpertWeights((weight1,), (weight2,), (view_fc1, view_fc2), stacked=True)


def _unknown_layout(experts: nn.Module, found: dict[str, nn.Parameter], count: int) -> str:
    expected = {n.format(i=i) for layout in LAYOUTS for n in layout.split(", ") for i in range(count)}
    extra = [name for name in found if name not in expected]
    shown = ", ".join(list(found)[:6]) + (", ..." if len(found) > 6 else "")
    text = (
        f"the parameters of {type(experts).__name__} are in no layout that --moe-backend=mok knows. Expected for {count} local "
        f"experts one of: {'; '.join(LAYOUTS)}. Found: {shown or 'none'}"
    )
    if extra:
        wrapped = {name.split(".linear_fc")[0] for name in extra}
        owner = type(experts.get_submodule(extra[0].rpartition(".")[0])).__name__
        text += (
            f". Not an expert matrix: {', '.join(extra[:4])} (in a {owner}; {len(wrapped)} place(s)). Expert bias, LoRA or other "
            "PEFT-wrapped experts and single grouped weights are not supported"
        )
    return text


def call_experts(experts: nn.Module, compute: Callable[..., Any], *args: Any) -> Any:
    """Runs ``compute(*args)`` as the experts module's forward, so that the module's own hooks see it.

    Before ``compute``, the pre-forward hooks of all submodules are fired, since their forward will not run: with
    ``--overlap-param-gather`` (and Megatron-FSDP's fine-grained gather) a parameter is stale until its module's hook has run.

    Raises:
        MoKUnsupportedError: a hook of a submodule wants to change an input, which never exists here.
    """

    def forward(*inputs: Any) -> Any:
        for submodule in experts.modules():
            if submodule is not experts:
                fire_pre_forward_hooks(submodule)
        return compute(*inputs)

    # For the time of this call only: a bound function left on the module would be pickled and copied with it.
    theirs = vars(experts).get("forward")
    experts.forward = forward
    try:
        return experts(*args)
    finally:
        del experts.forward
        if theirs is not None:
            experts.forward = theirs


def fire_pre_forward_hooks(module: nn.Module) -> None:
    """Calls the module's pre-forward hooks with no input.

    Raises:
        MoKUnsupportedError: a hook returned a replacement for the input.
    """
    for key, hook in list(module._forward_pre_hooks.items()):
        takes_keywords = key in module._forward_pre_hooks_with_kwargs
        result = hook(module, (), {}) if takes_keywords else hook(module, ())
        if result is not None:
            raise MoKUnsupportedError(
                f"a pre-forward hook of {type(module).__name__} changes its input; inside the fused experts of "
                "--moe-backend=mok that input never exists"
            )
