"""The publishers' forms of quantized checkpoints, as their config.json describes them. No torch."""
