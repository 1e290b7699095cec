"""Triton kernels that read and write the paged cache. Each has a plain-torch twin."""
