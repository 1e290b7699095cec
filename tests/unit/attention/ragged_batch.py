"""Several requests' queries, keys and values, poisoned outside of the batch, and attention written out plainly.

Legend: T queries, S keys, H query heads, K kv heads, D key channels, V value channels.
"""

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from attention.kernels.paged.call import KernelFeatures
from tests.device import DEVICE

SCALE = 0.3
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SLOPES_H = torch.linspace(0.5, 0.1, 4, device=DEVICE)
SINKS_H = torch.linspace(-1.0, 2.0, 4, device=DEVICE)
FEATURES = {
    "none": KernelFeatures(),
    "not causal": KernelFeatures(causal=False),
    "window of 1": KernelFeatures(sliding_window=1),
    "window of 7": KernelFeatures(sliding_window=7),
    "window of 65": KernelFeatures(sliding_window=65),
    "window of 1, not causal": KernelFeatures(causal=False, sliding_window=1),
    "window of 9, not causal": KernelFeatures(causal=False, sliding_window=9),
    "window of 70, not causal": KernelFeatures(causal=False, sliding_window=70),
    "chunks of 32": KernelFeatures(attention_chunk_size=32),
    "chunks of 9": KernelFeatures(attention_chunk_size=9),
    "soft cap": KernelFeatures(logits_soft_cap=1.5),
    "ALiBi": KernelFeatures(alibi_slopes_H=SLOPES_H),
    "sinks": KernelFeatures(sinks_H=SINKS_H),
    "all": KernelFeatures(
        sliding_window=40, attention_chunk_size=64, logits_soft_cap=1.5, alibi_slopes_H=SLOPES_H, sinks_H=SINKS_H
    ),
}
# Rows past the batch's own in queries and outputs, as in a padded CUDA graph.
PADDING = 3


def starts_of(lens: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=DEVICE)


@dataclass(frozen=True)
class RaggedBatch:
    """`q`, `k` and `v` are each request's; `out_THV` and `lse_HT` are poisoned, and longer than the batch."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    out_THV: Tensor
    lse_HT: Tensor

    @property
    def query_lens(self) -> list[int]:
        return [len(q_THD) for q_THD in self.q]

    @property
    def query_start_loc(self) -> Tensor:
        return starts_of(self.query_lens)

    @property
    def queries(self) -> Tensor:
        padding = self.q[0].new_full((PADDING, *self.q[0].shape[1:]), math.nan)
        return torch.cat([*self.q, padding]).to(DEVICE)

    def check(self, features: KernelFeatures) -> None:
        """Checks that the outputs equal the definition, and that memory past the batch is unchanged."""
        tolerance = TOLERANCE[self.out_THV.dtype]
        for request, (start, stop) in enumerate(pairwise(self.query_start_loc.tolist())):
            expected_THV, expected_HT = attend_plainly(self.q[request], self.k[request], self.v[request], features)
            torch.testing.assert_close(
                self.out_THV[start:stop].cpu().double(), expected_THV, atol=tolerance, rtol=tolerance
            )
            torch.testing.assert_close(self.lse_HT[:, start:stop].cpu().double(), expected_HT, atol=1e-5, rtol=1e-5)
        total = sum(self.query_lens)
        assert self.out_THV[total:].isnan().all()
        assert self.lse_HT[:, total:].isnan().all()


def ragged_batch(
    query_lens: list[int],
    key_lens: list[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 16,
    value_size: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> RaggedBatch:
    torch.manual_seed(0)
    value_size = value_size or head_size
    num_tokens = sum(query_lens) + PADDING
    return RaggedBatch(
        [torch.randn(query_len, num_heads, head_size).to(dtype) for query_len in query_lens],
        [torch.randn(key_len, num_kv_heads, head_size).to(dtype) for key_len in key_lens],
        [torch.randn(key_len, num_kv_heads, value_size).to(dtype) for key_len in key_lens],
        torch.full((num_tokens, num_heads, value_size), math.nan, dtype=dtype, device=DEVICE),
        torch.full((num_heads, num_tokens), math.nan, device=DEVICE),
    )


def attend_plainly(q_THD: Tensor, k_SKD: Tensor, v_SKV: Tensor, features: KernelFeatures) -> tuple[Tensor, Tensor]:
    """Output [T, H, V] and log-sum-exp [H, T] of one request, float64 on the CPU."""
    group = q_THD.shape[1] // k_SKD.shape[1]
    k_SHD, v_SHV = (kv.double().repeat_interleave(group, dim=1) for kv in (k_SKD, v_SKV))
    scores_HTS = torch.einsum("thd,shd->hts", q_THD.double(), k_SHD) * SCALE
    num_queries, num_keys = len(q_THD), len(k_SKD)
    keys_1S = torch.arange(num_keys)[None, :]
    positions_T1 = torch.arange(num_queries)[:, None] + num_keys - num_queries
    if features.logits_soft_cap is not None:
        scores_HTS = features.logits_soft_cap * torch.tanh(scores_HTS / features.logits_soft_cap)
    if features.alibi_slopes_H is not None:
        slopes_H11 = features.alibi_slopes_H.cpu().double()[:, None, None]
        scores_HTS = scores_HTS + slopes_H11 * (keys_1S - positions_T1)
    seen_TS = keys_1S <= positions_T1 if features.causal else torch.ones(num_queries, num_keys, dtype=torch.bool)
    if features.sliding_window is not None:
        seen_TS = seen_TS & ((keys_1S - positions_T1).abs() < features.sliding_window)
    if features.attention_chunk_size is not None:
        first_T1 = positions_T1 // features.attention_chunk_size * features.attention_chunk_size
        seen_TS = seen_TS & (keys_1S >= first_T1)
    weights_HTS = scores_HTS.exp() * seen_TS
    total_HT = weights_HTS.sum(-1)
    if features.sinks_H is not None:
        total_HT = total_HT + features.sinks_H.cpu().double().exp()[:, None]
    nonzero_HT1 = total_HT.where(total_HT > 0, torch.ones_like(total_HT))[..., None]
    return torch.einsum("hts,shv->thv", weights_HTS / nonzero_HT1, v_SHV), total_HT.log()
