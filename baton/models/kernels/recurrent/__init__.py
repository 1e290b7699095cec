"""Kernels for recurrent layers."""
