"""Tests that need a Hopper GPU; skipped, with the reason, where there is none."""
