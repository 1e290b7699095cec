"""The Triton kernels of sampling: pure functions of tensors. Each has a plain-torch twin that tests compare with."""
