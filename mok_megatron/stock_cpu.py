"""What stock Megatron-Core needs to train a MoE model on a machine without CUDA.

Megatron-Core asks ``torch.cuda`` for streams, events, generator states and the current device while it builds and runs
an MoE layer, allocates scalars on the literal device ``'cuda'`` in its optimizers, and tests ``tensor.type()`` against
``'torch.cuda.…'`` names. None of that has anything to do with the arithmetic. :func:`enable_stock_cpu` gives each of
those questions an answer that means "the CPU", for the rest of the process. Nothing here touches an MoE computation: the
dispatchers, the router, the experts, DDP and the optimizers that run are Megatron's own.

Only the demo and the tests call this. It refuses where there is a usable GPU, so it can never slow down or change a run
that has one. Written for megatron-core 0.16.1 to 0.19.x with the local (not Transformer Engine) layer spec.

The model's configuration has to ask for nothing that exists as a CUDA kernel only: :data:`CPU_CONFIG` has the settings.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mok_megatron.errors import MoKUnsupportedError

CPU_CONFIG: dict[str, Any] = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "add_bias_linear": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "apply_rope_fusion": False,
}
"""TransformerConfig arguments without which Megatron-Core calls code that exists for CUDA only."""

_enabled: _CudaMeansCpu | None = None


class _Event:
    """Stands in for ``torch.cuda.Event``: CPU work is done when the call that did it returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 0.0


class _Stream:
    """Stands in for ``torch.cuda.Stream``. All instances are the one CPU "stream", hence equal."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> _Event:
        return event or _Event()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _CudaMeansCpu(TorchFunctionMode):
    """Sends what Megatron-Core allocates on the literal device ``'cuda'`` to the CPU."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's optimizers sort parameters by this name and know only the CUDA ones.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
        if func is torch.Tensor.to:
            args = tuple(torch.device("cpu") if _is_cuda(a) else a for a in args)
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and (device == "cuda" or device.startswith("cuda:"))


def is_enabled() -> bool:
    """Whether :func:`enable_stock_cpu` has run in this process."""
    return _enabled is not None


def enable_stock_cpu() -> None:
    """Makes stock Megatron-Core run on the CPU in this process, from now on; calling it again does nothing.

    May be called before or after Megatron is imported and before or after torch.distributed is initialised, but before
    the first layer is built, and in the thread that trains.

    Raises:
        MoKUnsupportedError: there is a usable GPU (Megatron needs no help then), or Megatron-Core cannot be imported.
    """
    global _enabled
    if _enabled is not None:
        return
    if torch.cuda.is_available():
        raise MoKUnsupportedError(
            "enable_stock_cpu() refused: torch.cuda.is_available() is True. It redirects Megatron's CUDA calls to the "
            "CPU and is for machines without a usable GPU; to try it on this machine, hide the GPUs with "
            "CUDA_VISIBLE_DEVICES=''"
        )
    _redirect_torch_cuda()
    try:
        _patch_megatron()
    except ImportError as error:
        raise MoKUnsupportedError(
            f"enable_stock_cpu() needs Megatron-Core, which cannot be imported: {error}. Install it with "
            "pip install megatron-core (0.19.2 on Python 3.12, 0.16.1 on Python 3.11)"
        ) from error
    _enabled = _CudaMeansCpu()
    _enabled.__enter__()


def _redirect_torch_cuda() -> None:
    cpu = torch.device("cpu")
    no_state = torch.zeros(0, dtype=torch.uint8)
    stand_ins: dict[str, Any] = {
        "Event": _Event,
        "Stream": _Stream,
        "current_device": lambda: cpu,
        "current_stream": lambda device=None: _Stream(),
        "default_stream": lambda device=None: _Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda device=None: None,
        "is_current_stream_capturing": lambda: False,
        # Saved and restored around recomputation. The CPU generator, which dropout uses here, is saved beside it.
        "get_rng_state": lambda device="cuda": no_state,
        "set_rng_state": lambda new_state, device="cuda": None,
    }
    for name, stand_in in stand_ins.items():
        setattr(torch.cuda, name, stand_in)


def _patch_megatron() -> None:
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    moe_utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    token_dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")

    class CpuRNGStatesTracker(random.CudaRNGStatesTracker):  # type: ignore[misc]
        """Dropout and initialisation draw from the one CPU generator: there is no second state to fork to."""

        def add(self, name: str, seed: int) -> None: ...

        @contextlib.contextmanager
        def fork(self, name: str = "") -> Iterator[None]:
            yield

    random._CUDA_RNG_STATE_TRACKER = CpuRNGStatesTracker()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.cuda.get_rng_state()
    random._set_cuda_rng_state = lambda *args, **kwargs: None

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        # Stock code acts on CUDA tensors alone, and then gives all_to_all_single its splits as lists.
        return tensor.tolist() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu
    token_dispatcher.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16.1 reads the name also where Transformer Engine is absent
