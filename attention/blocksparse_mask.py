"""The block-sparse pattern as masks, for plain torch and for tests, which compare the kernels with them.

Legend: H query heads of this rank, I query blocks, J key blocks, T queries, S keys.
"""

import numpy as np
from numpy.typing import NDArray

from attention.blocksparse import BlocksparseParams


def block_mask(params: BlocksparseParams, num_query_blocks: int, num_key_blocks: int) -> NDArray[np.bool_]:
    """Returns [H, I, J], True where a query block sees a key block (on the diagonal, a part of it).

    The last query block is the last key block, so fewer query blocks than key blocks are the end of a sequence.
    """
    assert num_query_blocks <= num_key_blocks
    i_I1 = np.arange(num_key_blocks - num_query_blocks, num_key_blocks)[:, None]
    j_J = np.arange(num_key_blocks)
    offset_H11 = np.array(params.head_offsets)[:, None, None]
    on_stripe_H1J = (j_J + offset_H11 + 1) % params.vert_stride == 0
    mask_HIJ: NDArray[np.bool_] = (j_J <= i_I1) & ((i_I1 - j_J < params.local_blocks) | on_stripe_H1J)
    return mask_HIJ


def token_mask(params: BlocksparseParams, positions_T: NDArray[np.int64], num_keys: int) -> NDArray[np.bool_]:
    """Returns [H, T, S], True where a query at `positions_T` sees one of a sequence's first `num_keys` keys."""
    key_positions_S = np.arange(num_keys)
    num_blocks = max(int(positions_T.max()) + 1, num_keys) // params.block_size + 1
    blocks_HIJ = block_mask(params, num_blocks, num_blocks)
    blocks_HTS = blocks_HIJ[:, positions_T[:, None] // params.block_size, key_positions_S // params.block_size]
    mask_HTS: NDArray[np.bool_] = blocks_HTS & (key_positions_S <= positions_T[:, None])
    return mask_HTS
