"""What all Triton code shares: launching, numbers in 8 bits, rounding."""
