"""Writes -inf to the logits of tokens that a bit mask forbids, in place. One program for each slice of a row."""

import triton
import triton.language as tl
from torch import Tensor

_SLICE = 4096
_NUM_WARPS = 4


def apply_mask(logits_RV: Tensor, row_G: Tensor, masks_GW: Tensor, *, slice_size: int = _SLICE) -> None:
    """Keeps the tokens whose bit is 1.

    Args:
        row_G: int64, the rows of the logits that have a mask.
        masks_GW: int32, contiguous, one bit a token, the lowest id in the lowest bit of the first word.
    """
    num_masks, words = masks_GW.shape
    vocab_size = logits_RV.shape[1]
    assert logits_RV.stride(1) == 1, "a row's logits are adjacent"
    assert 32 * words >= vocab_size, "a bit for each token"
    grid = (triton.cdiv(vocab_size, slice_size), num_masks)
    _mask_kernel[grid](
        logits_RV,
        row_G,
        masks_GW,
        logits_RV.stride(0),
        vocab_size,
        words,
        SLICE=slice_size,
        num_warps=_NUM_WARPS,
    )


@triton.jit(do_not_specialize=["words"], do_not_specialize_on_alignment=["rows_ptr"])
def _mask_kernel(logits_ptr, rows_ptr, masks_ptr, stride_R, vocab_size, words, SLICE: tl.constexpr):
    slice_, mask = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + mask)
    ids = slice_ * SLICE + tl.arange(0, SLICE)
    inside = ids < vocab_size
    bits = tl.load(masks_ptr + mask * words + (ids >> 5), mask=inside, other=-1)
    forbidden = ((bits >> (ids & 31)) & 1) == 0
    tl.store(logits_ptr + row * stride_R + ids, tl.full((SLICE,), -float("inf"), tl.float32), mask=inside & forbidden)
