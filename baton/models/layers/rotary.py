"""Rotary position embedding: positions to angles, once per forward.

`attention.rotation` applies them. Shapes: T token, P pair of channels.
"""

import math

import torch
from torch import Tensor, nn

from attention.rotation import Rotation
from baton.models.config.rope import (
    AlphaScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeConfig,
    YarnScaling,
)
from baton.models.kernels.rotary import angles


class Rotary(nn.Module):
    """Computes the angles of a batch's positions in float32. It keeps no table: those of the longest contexts take
    gigabytes."""

    frequencies: Tensor

    def __init__(self, rope: RopeConfig) -> None:
        super().__init__()
        self.interleaved = rope.interleaved
        self.scale = rope.scaling.rotary_scale if isinstance(rope.scaling, YarnScaling | LongRopeScaling) else 1.0
        # NOTE: computed on the host for every device: a GPU's powers differ in the last bit, and late positions
        # multiply that difference.
        with torch.device("cpu"):
            frequencies = inverse_frequencies(rope)
        self.register_buffer("frequencies", frequencies.to(torch.get_default_device()), persistent=False)

    def forward(self, positions_T: Tensor) -> Rotation:
        if positions_T.is_cuda:
            return Rotation(*angles(positions_T, self.frequencies, self.scale), self.interleaved)
        angles_TP = positions_T[:, None].float() * self.frequencies
        return Rotation(angles_TP.cos() * self.scale, angles_TP.sin() * self.scale, self.interleaved)


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Returns radians per position of each pair of channels [dim/2].

    NOTE: float32 throughout, as models are trained with; at position 100,000 the rounding is 0.006 radians, so a more
    exact table would be another model.
    """
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    frequencies = 1.0 / (rope.theta**exponents)
    match rope.scaling:
        case AlphaScaling(alpha):
            base: float = rope.theta * alpha ** (rope.dim / (rope.dim - 2))
            return 1.0 / (base**exponents)
        case LongRopeScaling():
            return 1.0 / (torch.tensor(rope.scaling.factors, dtype=torch.float32) * rope.theta**exponents)
        case LinearScaling(factor):
            return frequencies / factor
        case Llama3Scaling():
            return _llama3(frequencies, rope.scaling)
        case YarnScaling():
            return _yarn(frequencies, rope.scaling, dim=rope.dim, theta=rope.theta)
        case ProportionalScaling(factor, turning):
            return torch.cat((frequencies[:turning] / factor, torch.zeros_like(frequencies[turning:])))
    return frequencies


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Pairs that turn rarely in the original context are stretched, those that turn often are kept, and those between
    are blended linearly."""
    turns = scaling.original_max_position_embeddings / (2 * math.pi / frequencies)
    width = scaling.high_freq_factor - scaling.low_freq_factor or 0.001  # a step, when both are the same
    kept = (turns - scaling.low_freq_factor) / width
    return torch.lerp(frequencies / scaling.factor, frequencies, kept.clamp(0, 1))


def _yarn(frequencies: Tensor, scaling: YarnScaling, *, dim: int, theta: float) -> Tensor:
    """Blends linearly between the pair that turns `beta_fast` times and the pair that turns `beta_slow` times."""

    def pair_that_turns(times: float) -> float:
        return dim * math.log(scaling.original_max_position_embeddings / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first or 0.001  # a step, when both ends fall together
    stretched = ((torch.arange(dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return torch.lerp(frequencies, frequencies / scaling.factor, stretched)
