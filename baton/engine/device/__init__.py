"""Steps on the device: inputs, CUDA graphs, the threads that launch them, and the profile at start."""
