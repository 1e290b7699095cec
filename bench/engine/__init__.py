"""The engine on one GPU: decode steps against the roofline, prefill against the matmul rate, and the host's cost."""
