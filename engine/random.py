"""Random numbers that are a function of (seed, output position, token id) and of nothing else. Batched tensor code.

Philox 4x32-10 after Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Knows
neither requests nor probabilities. Words are unsigned 32-bit values kept in int64.

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
        # NOTE: the product wraps modulo 2**64, so its bits are those of the unsigned product; the shift is arithmetic.
        product_2RG = (even_2RG * multipliers).flip(0)
        even_2RG = product_2RG >> 32
        even_2RG.bitwise_and_(_MASK).bitwise_xor_(odd_2RG).bitwise_xor_(round_key_2R1)
        odd_2RG = product_2RG.bitwise_and_(_MASK)
    return even_2RG, odd_2RG


def exponential_noise(seeds: list[int], positions: list[int], vocab_size: int, device: torch.device) -> Tensor:
    """Exponential(1) variates [R, V] in float32; row i belongs to seed `seeds[i]` at output position `positions[i]`.

    Key: the seed's low and high word. Counter: (token id // 4, position, 0, 0); output word: token id % 4.
    """
    num_groups = -(-vocab_size // 4)
    seed_words = [[seed & _MASK for seed in seeds], [seed >> 32 for seed in seeds]]
    *key, position_R = torch.tensor([*seed_words, positions], device=device).unbind(0)
    even_2RG = torch.zeros(2, len(seeds), num_groups, dtype=torch.int64, device=device)
    even_2RG[0] = torch.arange(num_groups, device=device)
    odd_2RG = torch.zeros_like(even_2RG)
    odd_2RG[0] = position_R.unsqueeze(1)
    even_2RG, odd_2RG = philox_4x32(even_2RG, odd_2RG, torch.stack(key).unsqueeze(2))
    words_RG4 = torch.stack((even_2RG[0], odd_2RG[0], even_2RG[1], odd_2RG[1]), dim=2)
    words_RV = words_RG4.view(len(seeds), -1)[:, :vocab_size]
    # Small variates decide who wins, and float32 resolves small values finely: so the uniform is near 0 there, not
    # near 1. Its largest values would round to 1, whose variate is infinite.
    uniform_RV = words_RV.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=_LARGEST_BELOW_ONE)
    return uniform_RV.neg_().log1p_().neg_()
