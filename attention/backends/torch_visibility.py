"""Computes from positions alone which keys a query sees, in plain torch.

Legend: H query heads, T queries, S keys.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.blocksparse import BlocksparseParams
from attention.blocksparse_mask import token_mask
from attention.parameters import AttentionParameters, AttentionType


@dataclass(frozen=True)
class KeyVisibility:
    """The rules that decide which keys a layer's queries see. Layers with equal rules share a plan.

    Attributes:
        causal: a query sees no key after its own position. Otherwise a window has as many keys after the query as
            before it.
        own_keys: the call brings all keys; no cache is read.
    """

    causal: bool
    own_keys: bool
    sliding_window: int | None
    attention_chunk_size: int | None

    @classmethod
    def of(cls, layer: AttentionParameters, *, causal: bool) -> "KeyVisibility":
        return cls(
            causal=causal and layer.attn_type is AttentionType.DECODER,
            own_keys=layer.attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY),
            sliding_window=layer.sliding_window,
            attention_chunk_size=layer.attention_chunk_size,
        )

    @property
    def is_everything(self) -> bool:
        return not self.causal and self.sliding_window is None and self.attention_chunk_size is None

    def first_keys(self, positions_T: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the first key that each query sees."""
        first_T = np.zeros_like(positions_T)
        if self.sliding_window is not None:
            first_T = np.maximum(first_T, positions_T - (self.sliding_window - 1))
        if self.attention_chunk_size is not None:
            first_T = np.maximum(first_T, positions_T // self.attention_chunk_size * self.attention_chunk_size)
        return first_T

    def stop_key(self, position: int, num_keys: int) -> int:
        """Returns one past the last key that the query at `position` sees."""
        if self.causal:
            return position + 1
        return num_keys if self.sliding_window is None else min(num_keys, position + self.sliding_window)

    def unseen(self, positions_T: NDArray[np.int64], key_positions_S: NDArray[np.int64]) -> Tensor:
        """Returns [T, S] bool, True where the query does not see the key."""
        unseen_TS = key_positions_S < self.first_keys(positions_T)[:, None]
        if self.causal:
            unseen_TS |= key_positions_S > positions_T[:, None]
        elif self.sliding_window is not None:
            unseen_TS |= key_positions_S >= positions_T[:, None] + self.sliding_window
        return torch.from_numpy(unseen_TS)


def unseen_by_pattern(
    params: BlocksparseParams, positions_T: NDArray[np.int64], key_positions_S: NDArray[np.int64]
) -> Tensor:
    """Returns [H, T, S] bool, True where a block-sparse pattern or causality hides the key from the query."""
    seen_HTS = token_mask(params, positions_T, int(key_positions_S[-1]) + 1)
    return torch.from_numpy(~seen_HTS[:, :, key_positions_S])
