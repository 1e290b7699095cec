"""The engine's Triton kernels: pure functions of tensors, one file per idea. Each has a plain-torch twin to be compared
with. Knows neither requests nor steps."""
