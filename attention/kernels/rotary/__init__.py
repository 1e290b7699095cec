"""Norm, rotary turn and cache write of new queries, keys and latents, in one launch."""
