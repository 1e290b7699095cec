"""The most likely tokens of each row, the same ones in any batch. Pure.

bf16 logits of different tokens are often equal. `Tensor.topk` orders those by how it splits its work, which depends on
the number of rows. Legend: L rows, V tokens of the vocabulary, N alternatives.
"""

import torch
from torch import Tensor


def top_tokens(logprobs_LV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` most likely tokens of each row, the more likely first, and of equal ones the lower id.

    Args:
        logprobs_LV: float32, none of them NaN.

    Returns:
        Their logprobs [L, N], float32, and their ids [L, N], int64.
    """
    bits_LV = (logprobs_LV + 0.0).view(torch.int32)  # the sum turns -0.0 into 0.0
    # The bits of a negative float, taken as an integer, fall as the float rises.
    ordered_LV = torch.where(bits_LV < 0, bits_LV ^ 0x7FFFFFFF, bits_LV)
    last = logprobs_LV.shape[1] - 1
    reversed_V = torch.arange(last, -1, -1, device=logprobs_LV.device)
    keys_LV = (ordered_LV.long() << 32) + reversed_V
    token_ids_LN = last - (keys_LV.topk(count, dim=-1).values & 0xFFFFFFFF)
    return logprobs_LV.gather(1, token_ids_LN), token_ids_LN
