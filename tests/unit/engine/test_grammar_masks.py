"""Masks of grammars on logits: the kernel equals its twin on the CPU."""

import numpy as np
import pytest
import torch

from baton.engine.sampling.kernels.mask import apply_mask
from baton.engine.sampling.masks import keep_allowed
from tests.device import DEVICE


@pytest.mark.parametrize("vocab_size", [31, 32, 203, 4096])
@pytest.mark.parametrize("words_more", [0, 2])
def test_the_kernel_forbids_what_its_twin_forbids(vocab_size: int, words_more: int) -> None:
    generator = np.random.default_rng(vocab_size)
    words = -(-vocab_size // 32) + words_more
    masks = generator.integers(-(2**31), 2**31, (3, words)).astype(np.int32)
    masks[2] = 0
    rows = np.array([4, 0, 2])
    logits = torch.from_numpy(generator.normal(size=(5, vocab_size)).astype(np.float32))
    ours, twin = logits.clone().to(DEVICE), logits.clone()
    apply_mask(ours, torch.from_numpy(rows).to(DEVICE), torch.from_numpy(masks).to(DEVICE), slice_size=64)
    keep_allowed(twin, torch.from_numpy(rows), torch.from_numpy(masks))
    assert torch.equal(ours.cpu(), twin)
    assert torch.equal(twin[[1, 3]], logits[[1, 3]])
    for row, mask in zip(rows, masks, strict=True):
        for token_id in range(vocab_size):
            is_allowed = bool(int(mask[token_id // 32]) >> (token_id % 32) & 1)
            assert twin[row, token_id] == (logits[row, token_id] if is_allowed else -torch.inf)
