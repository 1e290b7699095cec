"""Triton kernels of the layers and the functions that launch them. Their twins in plain torch run on a CPU."""
