"""TODO baton/models/kernels/moe"""
