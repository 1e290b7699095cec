"""Kernels for products of quantized weights."""
