"""Parts that the block-sparse kernels of prompts and of decodes share: products, loading rows, a softmax step.

Legend: M queries of a tile, N keys of a tile, D channels.
"""

import triton
import triton.language as tl

from baton.tritonlib.fp8 import from_fp8


@triton.jit
def dot(a, b, acc, INTERPRETED: tl.constexpr):
    """Multiplies; the product is exact to float32 where the operands are float32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def cached_rows(base, positions, pages_ptr, stride_block, stride_token, CACHE_BLOCK: tl.constexpr):
    """Returns pointers [N, 1] to the first channel of the tokens at these positions of one request."""
    pages = tl.load(pages_ptr + positions // CACHE_BLOCK).to(tl.int64)
    return base + (pages * stride_block + (positions % CACHE_BLOCK) * stride_token)[:, None]


@triton.jit
def load_rows(rows, channels, wanted, HEAD_SIZE: tl.constexpr, dtype, FP8: tl.constexpr, INTERPRETED: tl.constexpr):
    """Loads [N, D] with the wanted rows (None: all) and zeros for the others, as operands of a product."""
    pointers = rows + channels[None, :]
    if wanted is not None:
        stored = tl.load(pointers, mask=wanted[:, None] & (channels < HEAD_SIZE)[None, :], other=0.0)
    elif channels.shape[0] > HEAD_SIZE:
        stored = tl.load(pointers, mask=(channels < HEAD_SIZE)[None, :], other=0.0)
    else:
        stored = tl.load(pointers)
    return (from_fp8(stored, INTERPRETED) if FP8 else stored).to(dtype)


@triton.jit
def soften(scores, scale, m, total):
    """Does one step of a softmax in base 2; returns the weights, the factor for earlier results, the new maximum and
    total."""
    m_new = tl.maximum(m, tl.max(scores, 1) * scale)
    # For a query that has seen no key yet, any finite maximum gives weights of 0.
    m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)
    weights = tl.exp2(scores * scale - m_finite[:, None])
    shrink = tl.exp2(m - m_finite)
    return weights, shrink, m_new, total * shrink + tl.sum(weights, 1)
