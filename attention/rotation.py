"""Norms per head and rotation by position, applied to queries and keys between projection and attention.

Values and plain torch, the twins of `attention.kernels.rotary.heads` and `attention.kernels.rotary.latents`.
Shapes: T token, H head, D rotary channel, P pair of channels, D = 2 P.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor


class RowNorm(Protocol):
    """An RMS norm over the last axis: x / sqrt(mean(x ** 2) + eps) * (weight_offset + weight), computed in float32 and
    rounded once."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def eps(self) -> float: ...

    @property
    def weight_offset(self) -> int: ...

    def __call__(self, x: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class HeadNorms:
    """The norms of each head of the queries and of the keys, before they turn."""

    q: RowNorm
    k: RowNorm


@dataclass(frozen=True)
class Rotation:
    """The angles of one batch's tokens.

    Attributes:
        cos_TP, sin_TP: float32, contiguous.
        interleaved: channels 2i and 2i+1 turn together; otherwise channel i and i + P.
    """

    cos_TP: Tensor
    sin_TP: Tensor
    interleaved: bool

    def apply(self, x_THD: Tensor) -> Tensor:
        """`x_THD` turned, in its dtype, with its channels in their order. Computes in float32."""
        cos_T1D, sin_T1D = self._by_channel
        if self.interleaved:
            partner_THD = torch.unflatten(x_THD, -1, (-1, 2)).flip(-1).flatten(-2)
        else:
            partner_THD = x_THD.roll(x_THD.shape[-1] // 2, -1)
        return torch.addcmul(x_THD * cos_T1D, partner_THD, sin_T1D).to(x_THD.dtype)

    @cached_property
    def _by_channel(self) -> tuple[Tensor, Tensor]:
        """Cosine and sine, [T,1,D] each; the sine has the sign with which the channel's partner is added."""
        if self.interleaved:
            cos_TD = self.cos_TP.repeat_interleave(2, dim=-1)
            sin_TD = torch.stack((-self.sin_TP, self.sin_TP), dim=-1).flatten(-2)
        else:
            cos_TD = torch.cat((self.cos_TP, self.cos_TP), dim=-1)
            sin_TD = torch.cat((-self.sin_TP, self.sin_TP), dim=-1)
        return cos_TD.unsqueeze(1), sin_TD.unsqueeze(1)
