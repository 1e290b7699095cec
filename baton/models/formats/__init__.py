"""Quantized numbers in plain torch: packing, unpacking, and reference products for the kernels."""
