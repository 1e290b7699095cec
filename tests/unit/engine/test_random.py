"""Counter-based random numbers: the published generator, and the distribution of its variates."""

import math

import numpy as np
import pytest
import torch

from baton.engine.sampling.random import exponential_noise, philox_4x32

ONES = 0xFFFFFFFF


def noise_of(seeds: list[int], positions: list[int], vocab_size: int) -> torch.Tensor:
    bits = torch.from_numpy(np.array(seeds, np.uint64).view(np.int64))
    return exponential_noise(bits, torch.tensor(positions), vocab_size)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    even = torch.tensor([[[counter[0]]], [[counter[2]]]])
    odd = torch.tensor([[[counter[1]]], [[counter[3]]]])
    even, odd = philox_4x32(even, odd, torch.tensor([[[key[0]]], [[key[1]]]]))
    assert (even[0].item(), odd[0].item(), even[1].item(), odd[1].item()) == expected


def test_noise_depends_on_seed_position_and_token_alone() -> None:
    seeds = [0, 1, 2**64 - 1, 1]
    positions = [0, 7, 7, 8]
    together = noise_of(seeds, positions, 101)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        alone = noise_of([seed], [position], 101)
        assert torch.equal(alone[0], together[row])
        assert torch.equal(noise_of([seed], [position], 50)[0], together[row, :50])


def test_neighbouring_seeds_positions_and_halves_of_a_seed_share_nothing() -> None:
    keys = [(0, 0), (1, 0), (0, 1), (1 << 32, 0), (0, 2)]
    noise = noise_of([seed for seed, _ in keys], [position for _, position in keys], 4096)
    assert len(noise.flatten().unique()) > 0.999 * noise.numel()
    correlations = torch.corrcoef(noise) - torch.eye(len(keys))
    assert correlations.abs().max() < 5 / math.sqrt(4096)


def test_noise_is_exponential_and_finite() -> None:
    noise = noise_of([3] * 64, list(range(64)), 4096).double().flatten()
    assert noise.isfinite().all()
    assert (noise > 0).all()
    uniform = (1 - (-noise).exp()).sort().values
    # Kolmogorov-Smirnov distance to the uniform distribution; 1.95 is its quantile of 99.9 %.
    distance = (uniform - (torch.arange(len(uniform)) + 0.5) / len(uniform)).abs().max()
    assert distance * math.sqrt(len(uniform)) < 1.95
