"""The gateway as processes: start, workers, and the channel between them."""
