"""Makes the demo models of the wheel: their corpus and their training."""
