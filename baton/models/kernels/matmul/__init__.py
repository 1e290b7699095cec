"""Kernels for products of unquantized weights."""
