"""Decodes over a poisoned paged cache, and attention to them by its definition.

Legend: R requests, S keys, H query heads, K kv heads, D channels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.device import DEVICE

SCALE = 0.3
# The order of the axes in memory, of a layer's [K, B, N, H, C].
ORDERS = {
    "NHD": (0, 1, 2, 3, 4),
    "HND": (0, 1, 3, 2, 4),
    "block first": (1, 0, 2, 3, 4),
    "heads apart": (3, 1, 0, 2, 4),
}


@dataclass(frozen=True)
class Asked:
    """The features that a layer asks for."""

    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    logits_soft_cap: float | None = None
    alibi_slopes_H: Tensor | None = None
    sinks_H: Tensor | None = None

    def first_key(self, seq_len: int) -> int:
        window, chunk = self.sliding_window or seq_len, self.attention_chunk_size or seq_len
        return max(0, seq_len - window, (seq_len - 1) // chunk * chunk)


@dataclass(frozen=True)
class Decodes:
    """`k` and `v` [S, K, D]: each request's keys and values as the cache holds them, times its scales."""

    q_RHD: Tensor
    kv_layer: Tensor
    seq_lens: Tensor
    block_table: Tensor
    k: list[Tensor]
    v: list[Tensor]

    def expected(self, asked: Asked) -> tuple[Tensor, Tensor]:
        """Output [R, H, D] and log-sum-exp [H, R], float64 on the CPU."""
        pairs = [attend_one(q_HD, k, v, asked) for q_HD, k, v in zip(self.q_RHD.cpu(), self.k, self.v, strict=True)]
        return torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1] for pair in pairs], 1)


def attend_one(q_HD: Tensor, k_SKD: Tensor, v_SKD: Tensor, asked: Asked) -> tuple[Tensor, Tensor]:
    """The result of a request's last token."""
    seq_len, num_heads = k_SKD.shape[0], q_HD.shape[0]
    if not seq_len:
        return torch.zeros(q_HD.shape, dtype=torch.float64), torch.full((num_heads,), -torch.inf, dtype=torch.float64)
    first, group = asked.first_key(seq_len), num_heads // k_SKD.shape[1]
    k_SHD, v_SHD = (kv[first:].double().repeat_interleave(group, dim=1) for kv in (k_SKD, v_SKD))
    scores_HS = torch.einsum("hd,shd->hs", q_HD.double(), k_SHD) * SCALE
    if asked.logits_soft_cap is not None:
        scores_HS = asked.logits_soft_cap * torch.tanh(scores_HS / asked.logits_soft_cap)
    if asked.alibi_slopes_H is not None:
        scores_HS = scores_HS + asked.alibi_slopes_H.cpu().double()[:, None] * (
            torch.arange(first, seq_len) - seq_len + 1
        )
    total_H = scores_HS.exp().sum(-1)
    if asked.sinks_H is not None:
        total_H = total_H + asked.sinks_H.cpu().double().exp()
    return torch.einsum("hs,shd->hd", scores_HS.exp() / total_H[:, None], v_SHD), total_H.log()


def decodes(
    seq_lens: list[int],
    *,
    num_heads: int = 2,
    num_kv_heads: int = 1,
    head_size: int = 16,
    block_size: int = 16,
    order: str = "NHD",
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    asked: Asked | None = None,
) -> Decodes:
    """Slots that no request may read are NaN, also those before the first key that `asked` lets it see. Unused entries
    of block tables are blocks far outside of the cache."""
    torch.manual_seed(0)
    counts = [-(-seq_len // block_size) for seq_len in seq_lens]
    num_blocks = sum(counts) + 3
    table = torch.full((len(seq_lens), max(counts) + 1), 2**30, dtype=torch.int32)
    dealt = iter(torch.randperm(num_blocks).tolist())
    axes = ORDERS[order]
    sizes = (2, num_blocks, block_size, num_kv_heads, head_size)
    kept = torch.empty([sizes[axis] for axis in axes], dtype=cache_dtype or dtype)
    kept.view(torch.uint8).fill_(0xFF)
    kv_layer = kept.permute([axes.index(axis) for axis in range(5)])
    k: list[Tensor] = []
    v: list[Tensor] = []
    for request, seq_len in enumerate(seq_lens):
        table[request, : counts[request]] = torch.tensor([next(dealt) for _ in range(counts[request])])
        positions = torch.arange((asked or Asked()).first_key(seq_len) if seq_len else 0, seq_len)
        for which, (values, scale) in enumerate(((k, k_scale), (v, v_scale))):
            rows = torch.randn(seq_len, num_kv_heads, head_size).to(kept.dtype)
            values.append(rows.float() * scale)
            places = table[request][positions // block_size].long(), positions % block_size
            _write(kv_layer[which], places, rows[positions])
    q_RHD = torch.randn(len(seq_lens), num_heads, head_size).to(dtype)
    return Decodes(
        q_RHD.to(DEVICE),
        kept.to(DEVICE).permute([axes.index(axis) for axis in range(5)]),
        torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
        table.to(DEVICE),
        k,
        v,
    )


def _write(kv_BNHC: Tensor, places: tuple[Tensor, Tensor], rows: Tensor) -> None:
    if rows.dtype.itemsize == 1:
        kv_BNHC, rows = kv_BNHC.view(torch.uint8), rows.view(torch.uint8)
    kv_BNHC[places] = rows
