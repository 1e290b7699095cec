"""Where tests of kernels run: compiled on a GPU where there is one, else interpreted on the CPU."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
