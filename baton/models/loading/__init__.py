"""Loads a checkpoint's files into a model's parameters."""
