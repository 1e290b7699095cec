"""Tiny random checkpoints that make embeddings or scores, and their reference."""
