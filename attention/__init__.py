"""Attention over the paged cache: metadata, layers, backends and kernels.

Tensors, positions and block tables go in, tensors come out. Importing this package or `blocksparse` imports no torch.
"""
