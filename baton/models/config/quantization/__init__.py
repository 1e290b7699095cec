"""Reads how quantized checkpoints are stored, in every publisher's form of config.json. It imports no torch."""
