"""What all Triton code shares: launching, whether kernels for Hopper run, numbers in 8 bits, rounding."""
