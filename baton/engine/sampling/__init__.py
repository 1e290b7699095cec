"""Turns logits into tokens. A new sampling option changes this folder and no other of the engine."""
