"""Attention over the paged cache: metadata, layers, backends and kernels.

It maps tensors, positions and block tables to tensors. Importing this package or `blocksparse` imports no torch.
"""
