"""Decodes over a latent cache."""
