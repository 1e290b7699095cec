"""Bit masks of the tokens that grammars allow in a step's rows, and their application to logits.

Suffixes: R row, G row with a grammar, W word of a mask, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.sampling.kernels.mask import apply_mask


@dataclass(frozen=True)
class Masks:
    """Masks of some rows, on the host.

    Args:
        rows_G: int64, the rows that have a mask.
        masks_GW: int32, one bit a token, the lowest id in the lowest bit of the first word; 1 allows the token.
    """

    rows_G: NDArray[np.int64]
    masks_GW: NDArray[np.int32]


def keep_allowed(logits_RV: Tensor, rows_G: Tensor, masks_GW: Tensor) -> None:
    """Writes -inf to the logits of all tokens that the masks forbid."""
    if logits_RV.is_cuda:
        apply_mask(logits_RV, rows_G, masks_GW)
    else:
        bits = np.unpackbits(masks_GW.numpy().view(np.uint8), axis=1, bitorder="little")
        forbidden_GV = torch.from_numpy(bits[:, : logits_RV.shape[1]]) == 0
        logits_RV[rows_G] = logits_RV[rows_G].masked_fill_(forbidden_GV, -torch.inf)
