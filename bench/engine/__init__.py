"""The engine on one GPU: decode steps beside the roofline, prefill beside the matmul rate, what the CPU costs."""
