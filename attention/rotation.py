"""Norms and rotates queries and keys between projection and attention.

It holds values and plain torch, the twins of `attention.kernels.rotary.heads` and `attention.kernels.rotary.latents`.
Shapes: T token, H head, K kv head, D head channel, R rotary channel, P pair of channels, R = 2 P <= D; X: the channels
of all heads of queries, keys and values.
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
    """The norms of each head of queries and keys, by default before they turn.

    Attributes:
        turned: the norms apply after the turn.
    """

    q: RowNorm
    k: RowNorm
    turned: bool = False

    def apply(self, q_THD: Tensor, k_TKD: Tensor) -> Tensor:
        """Returns normed queries and keys in one tensor, one after the other."""
        normed = (norm(x.flatten(0, 1)).view_as(x) for norm, x in ((self.q, q_THD), (self.k, k_TKD)))
        return torch.cat(tuple(normed), dim=1)


@dataclass(frozen=True)
class Rotation:
    """The angles of one batch's tokens. The first 2 P channels of a head turn; the others are unchanged.

    Attributes:
        cos_TP, sin_TP: float32, contiguous.
        interleaved: channels 2i and 2i+1 turn together; otherwise channels i and i + P.
        query_scale_T1: factor of each token's queries; models apply it themselves. None: 1.
    """

    cos_TP: Tensor
    sin_TP: Tensor
    interleaved: bool
    query_scale_T1: Tensor | None = None

    def apply(self, x_THD: Tensor) -> Tensor:
        """Turns `x_THD` in float32; returns it in its dtype and with its channels in order."""
        rotary = 2 * self.cos_TP.shape[1]
        if rotary == x_THD.shape[-1]:
            return self._turned(x_THD)
        return torch.cat((self._turned(x_THD[..., :rotary]), x_THD[..., rotary:]), dim=-1)

    def _turned(self, x_THR: Tensor) -> Tensor:
        cos_T1R, sin_T1R = self._by_channel
        if self.interleaved:
            partner_THR = torch.unflatten(x_THR, -1, (-1, 2)).flip(-1).flatten(-2)
        else:
            partner_THR = x_THR.roll(x_THR.shape[-1] // 2, -1)
        return torch.addcmul(x_THR * cos_T1R, partner_THR, sin_T1R).to(x_THR.dtype)

    @cached_property
    def _by_channel(self) -> tuple[Tensor, Tensor]:
        """Returns cosine and sine, [T,1,R] each; the sine has the sign with which the channel's partner is added."""
        if self.interleaved:
            cos_TR = self.cos_TP.repeat_interleave(2, dim=-1)
            sin_TR = torch.stack((-self.sin_TP, self.sin_TP), dim=-1).flatten(-2)
        else:
            cos_TR = torch.cat((self.cos_TP, self.cos_TP), dim=-1)
            sin_TR = torch.cat((-self.sin_TP, self.sin_TP), dim=-1)
        return cos_TR.unsqueeze(1), sin_TR.unsqueeze(1)


def split_heads(qkv_TX: Tensor, num_heads: int, num_kv_heads: int, *, gated: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Returns views of each token's queries [T, H, D], keys and values [T, K, D]. If `gated`, a gate follows each query
    head."""
    step = 2 if gated else 1
    heads = [step * num_heads, num_kv_heads, num_kv_heads]
    q_THD, k_TKD, v_TKD = qkv_TX.unflatten(-1, (sum(heads), -1)).split(heads, dim=1)
    return q_THD[:, ::step], k_TKD, v_TKD


def rotate_heads(
    qkv_TX: Tensor,
    rotation: Rotation | None,
    norms: HeadNorms | None,
    num_heads: int,
    num_kv_heads: int,
    *,
    gated: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norms and turns queries and keys; returns them and the values. Arguments are those of `split_heads`."""
    q_THD, k_TKD, v_TKD = split_heads(qkv_TX, num_heads, num_kv_heads, gated=gated)
    heads = [num_heads, num_kv_heads]
    if gated:
        qk_TXD = torch.cat((q_THD, k_TKD), dim=1)
    else:
        qk_TXD = qkv_TX.unflatten(-1, (-1, q_THD.shape[-1]))[:, : sum(heads)]
    if norms is not None and not norms.turned:
        qk_TXD = norms.apply(*qk_TXD.split(heads, dim=1))
    # Queries and keys turn by the same angles, so one rotation serves both.
    if rotation is not None:
        qk_TXD = rotation.apply(qk_TXD)
    if norms is not None and norms.turned:
        qk_TXD = norms.apply(*qk_TXD.split(heads, dim=1))
    q_THD, k_TKD = qk_TXD.split(heads, dim=1)
    return q_THD, k_TKD, v_TKD
