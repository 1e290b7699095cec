"""Kernels of sparse latent attention: scores of the tokens in the cache, and the selection of the best."""
