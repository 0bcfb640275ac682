"""Tests that a CPU can run."""
