"""Decoders with multi-head latent attention."""
