"""Quantized numbers in plain torch: packing, unpacking, and the products that kernels are compared with."""
