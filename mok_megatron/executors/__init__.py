"""Executors of the task stream."""
