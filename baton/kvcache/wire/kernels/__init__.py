"""Triton kernels between the paged cache and wire order. Each has a plain-torch twin."""
