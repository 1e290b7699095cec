"""Decoders whose every token takes the same weights."""
