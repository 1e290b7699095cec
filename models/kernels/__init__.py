"""Triton kernels of the layers. Each stands beside its wrapper; the twin in plain torch is what a CPU runs.

Knows tensors and sizes; no family, no configuration, no cache.
"""
