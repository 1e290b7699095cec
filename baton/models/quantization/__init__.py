"""Layers that compute with quantized weights, and their installation into a model."""
