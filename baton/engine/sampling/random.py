"""Random numbers that depend only on (seed, output position, token id). Batched tensor code.

Philox 4x32-10 after Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Words are
unsigned 32-bit values in int64.

Suffixes: R row, V vocabulary, G group of four neighbouring token ids.
"""

import torch
from torch import Tensor

_ROUNDS = 10
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def philox_4x32(even_2RG: Tensor, odd_2RG: Tensor, key_2R1: Tensor) -> tuple[Tensor, Tensor]:
    """Ten rounds over the counters (even[0], odd[0], even[1], odd[1]) under the keys (key[0], key[1]).

    Returns the four output words in the same arrangement.
    """
    device = key_2R1.device
    multipliers = torch.tensor(_MULTIPLIERS, device=device).view(2, 1, 1)
    steps = torch.tensor(_KEY_STEPS, device=device).view(1, 2, 1, 1)
    rounds = torch.arange(_ROUNDS, device=device).view(-1, 1, 1, 1)
    for round_key_2R1 in (key_2R1 + steps * rounds).bitwise_and_(_MASK).unbind(0):
        # NOTE: the product wraps modulo 2**64, so it has the bits of the unsigned product. The shift is arithmetic.
        product_2RG = (even_2RG * multipliers).flip(0)
        even_2RG = product_2RG >> 32
        even_2RG.bitwise_and_(_MASK).bitwise_xor_(odd_2RG).bitwise_xor_(round_key_2R1)
        odd_2RG = product_2RG.bitwise_and_(_MASK)
    return even_2RG, odd_2RG


def random_words(seed_R: Tensor, position_R: Tensor, vocab_size: int) -> Tensor:
    """Words [R, V]; each row has its own seed and output position.

    Key: the seed's low and high word. Counter: (token id // 4, position, 0, 0); output word: token id % 4.

    Args:
        seed_R: int64, the bits of an unsigned number.
        position_R: int64, below 2**32.
    """
    device = seed_R.device
    num_rows, num_groups = len(seed_R), -(-vocab_size // 4)
    even_2RG = torch.zeros(2, num_rows, num_groups, dtype=torch.int64, device=device)
    even_2RG[0] = torch.arange(num_groups, device=device)
    odd_2RG = torch.zeros_like(even_2RG)
    odd_2RG[0] = position_R.unsqueeze(1)
    key_2R = torch.stack((seed_R, seed_R >> 32)).bitwise_and_(_MASK)
    even_2RG, odd_2RG = philox_4x32(even_2RG, odd_2RG, key_2R.unsqueeze(2))
    words_RG4 = torch.stack((even_2RG[0], odd_2RG[0], even_2RG[1], odd_2RG[1]), dim=2)
    return words_RG4.view(num_rows, -1)[:, :vocab_size]


def exponential_noise(seed_R: Tensor, position_R: Tensor, vocab_size: int) -> Tensor:
    """Exponential(1) variates [R, V] in float32, made of `random_words`."""
    words_RV = random_words(seed_R, position_R, vocab_size)
    # Small variates decide the draw, so they come from uniforms near 0, where float32 is finer than near 1. The largest
    # uniforms would round to 1, whose variate is infinite.
    uniform_RV = words_RV.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=_LARGEST_BELOW_ONE)
    return uniform_RV.neg_().log1p_().neg_()
