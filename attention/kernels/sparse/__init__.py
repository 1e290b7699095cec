"""Kernels of sparse latent attention, which score the tokens in the cache and select the best."""
