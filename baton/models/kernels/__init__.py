"""Triton kernels of the layers, next to the functions that launch them. Their twins in plain torch run on a CPU."""
