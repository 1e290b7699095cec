"""Helpers for all Triton code: launches, the check of kernels for Hopper, numbers in 8 bits, rounding."""
