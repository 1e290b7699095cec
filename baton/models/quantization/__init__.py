"""Quantized weights: which ones a checkpoint has, and the layers that compute with them."""
