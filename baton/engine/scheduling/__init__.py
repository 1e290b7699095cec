"""Decides which requests run in the next step, and with which blocks. Pure: no tensors, no clock, no thread."""
