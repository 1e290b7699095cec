"""Decoders with routed experts whose attention is grouped-query."""
