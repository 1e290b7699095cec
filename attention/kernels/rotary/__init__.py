"""Kernels that norm, rotate and write new queries, keys and latents to the cache, in one launch."""
