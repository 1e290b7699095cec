"""TODO baton/models/kernels/quantized"""
