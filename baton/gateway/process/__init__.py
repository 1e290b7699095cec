"""The gateway's processes: start, workers, and the channel between them."""
