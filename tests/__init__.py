"""Tests of mok_megatron."""
