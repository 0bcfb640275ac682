"""MoK as a backend of Megatron-Core's MoE layers; the only part of the package that touches Megatron.

Public: :func:`apply_mok_to_megatron` (patches Megatron), :func:`set_microbatch` (for training loops other than Megatron's schedules),
``metrics.collect`` (expert load) and ``support`` (what is supported). Importing this loads neither Megatron nor the compiled library.

Limits: SwiGLU experts without bias, BF16 or FP32, expert tensor parallelism 1; see :mod:`mok_megatron.megatron.feature_table`.
"""

from mok_megatron.megatron.install import apply_mok_to_megatron
from mok_megatron.megatron.microbatch import set_microbatch

__all__ = ["apply_mok_to_megatron", "set_microbatch"]
