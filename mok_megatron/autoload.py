"""``import mok_megatron.autoload``, one line at the top of a training script, does what the launcher does."""

from mok_megatron.megatron import apply_mok_to_megatron

apply_mok_to_megatron()
