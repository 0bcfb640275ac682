"""Benchmarks of the MoE layer and the routing workloads they run on."""
