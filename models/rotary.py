"""Rotary position embedding: angles computed once per forward, applied in every layer.

Knows no family. Shapes: T token, H head, D rotary channel.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.rope_config import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling


@dataclass(frozen=True)
class Rotation:
    """The angles of one batch's tokens. Both [T,1,D]; `sin` carries the sign for each channel's partner."""

    cos: Tensor
    sin: Tensor
    interleaved: bool

    def apply(self, x_THD: Tensor) -> Tensor:
        """`x_THD` turned, in its dtype, with its channels in their order. Computes in float32."""
        if self.interleaved:
            partner_THD = torch.unflatten(x_THD, -1, (-1, 2)).flip(-1).flatten(-2)
        else:
            partner_THD = x_THD.roll(x_THD.shape[-1] // 2, -1)
        return torch.addcmul(x_THD * self.cos, partner_THD, self.sin).to(x_THD.dtype)


class Rotary(nn.Module):
    """Turns positions into angles: in float32, for each batch anew, because tables of the longest contexts are GBs."""

    frequencies: Tensor

    def __init__(self, rope: RopeConfig) -> None:
        super().__init__()
        self.interleaved = rope.interleaved
        self.scale = rope.scaling.rotary_scale if isinstance(rope.scaling, YarnScaling) else 1.0
        self.register_buffer("frequencies", inverse_frequencies(rope), persistent=False)

    def forward(self, positions_T: Tensor) -> Rotation:
        angles_TD = positions_T[:, None].float() * self.frequencies
        cos_TD, sin_TD = angles_TD.cos() * self.scale, angles_TD.sin() * self.scale
        if self.interleaved:
            cos_TD = cos_TD.repeat_interleave(2, dim=-1)
            sin_TD = torch.stack((-sin_TD, sin_TD), dim=-1).flatten(-2)
        else:
            cos_TD = torch.cat((cos_TD, cos_TD), dim=-1)
            sin_TD = torch.cat((-sin_TD, sin_TD), dim=-1)
        return Rotation(cos_TD.unsqueeze(1), sin_TD.unsqueeze(1), self.interleaved)


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Radians per position of each pair of channels [dim/2].

    NOTE: float32 throughout, as models are trained with; at position 100,000 the rounding is 0.006 radians, so a more
    exact table would be another model.
    """
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    frequencies = 1.0 / (rope.theta**exponents)
    match rope.scaling:
        case LinearScaling(factor):
            return frequencies / factor
        case Llama3Scaling():
            return _llama3(frequencies, rope.scaling)
        case YarnScaling():
            return _yarn(frequencies, rope.scaling, dim=rope.dim, theta=rope.theta)
    return frequencies


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Turns per original context decide: few are stretched, many kept, between them a linear blend."""
    turns = scaling.original_max_position_embeddings / (2 * math.pi / frequencies)
    width = scaling.high_freq_factor - scaling.low_freq_factor or 0.001  # a step, when both are the same
    kept = (turns - scaling.low_freq_factor) / width
    return torch.lerp(frequencies / scaling.factor, frequencies, kept.clamp(0, 1))


def _yarn(frequencies: Tensor, scaling: YarnScaling, *, dim: int, theta: float) -> Tensor:
    """Blends over channel pairs between the pair that turns `beta_fast` times and the one that turns `beta_slow`."""

    def pair_that_turns(times: float) -> float:
        return dim * math.log(scaling.original_max_position_embeddings / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first or 0.001  # a step, when both ends fall together
    stretched = ((torch.arange(dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return torch.lerp(frequencies, frequencies / scaling.factor, stretched)
