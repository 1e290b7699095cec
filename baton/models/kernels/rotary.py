"""Computes the angles of a batch's positions. The twin is in `baton.models.layers.rotary`. Legend: T tokens, P pairs of
channels."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 512


def angles(positions_T: Tensor, frequencies_P: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine [T, P], float32, times `scale`, of each position times each frequency (float32)."""
    shape = len(positions_T), len(frequencies_P)
    cos_TP, sin_TP = torch.empty((2, *shape), dtype=torch.float32, device=positions_T.device).unbind()
    block_p = triton.next_power_of_2(shape[1])
    tokens = max(1, _TILE // block_p)
    _angles[(triton.cdiv(shape[0], tokens),)](
        positions_T, frequencies_P, cos_TP, sin_TP, scale, shape[0], PAIRS=shape[1], TOKENS=tokens, BLOCK_P=block_p
    )
    return cos_TP, sin_TP


@triton.jit(do_not_specialize=["num_tokens"])
def _angles(
    positions_ptr,
    frequencies_ptr,
    cos_ptr,
    sin_ptr,
    scale,
    num_tokens,
    PAIRS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    tokens_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    pairs_P = tl.arange(0, BLOCK_P)
    mask_TP = (tokens_T < num_tokens)[:, None] & (pairs_P < PAIRS)[None, :]
    positions_T = tl.load(positions_ptr + tokens_T, mask=tokens_T < num_tokens, other=0).to(tl.float32)
    frequencies_P = tl.load(frequencies_ptr + pairs_P, mask=pairs_P < PAIRS, other=0.0)
    angles_TP = positions_T[:, None] * frequencies_P[None, :]
    at_TP = tokens_T.to(tl.int64)[:, None] * PAIRS + pairs_P[None, :]
    # NOTE: the language's own functions, which reduce large angles exactly; the hardware's fast ones do not.
    tl.store(cos_ptr + at_TP, tl.cos(angles_TP) * scale, mask=mask_TP)
    tl.store(sin_ptr + at_TP, tl.sin(angles_TP) * scale, mask=mask_TP)
