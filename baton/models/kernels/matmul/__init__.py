"""TODO baton/models/kernels/matmul"""
