"""The Triton kernels: pure functions of tensors, one file per idea. Tests compare each with a plain-torch twin.

A kernel takes strides, so that one kernel serves every cache layout.
"""
