"""Kernels for routed experts."""
