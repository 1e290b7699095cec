"""The Triton kernels: pure functions of tensors, one file per idea. Each has a plain-torch twin to be compared with.

Knows layers, batches and backends not at all. A kernel takes strides, so that one kernel serves every cache layout.
"""
