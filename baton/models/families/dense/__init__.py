"""Decoders in which all tokens use the same weights."""
