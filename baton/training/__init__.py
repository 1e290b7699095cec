"""Trains the demo models that the wheel has: their corpus and their training."""
