"""Attention over adjacent keys equals attention by its definition for any lengths and features."""

import pytest
import torch
from torch import Tensor

from attention.kernels.paged.attend import ragged_attention
from attention.kernels.paged.call import KernelFeatures
from tests.device import DEVICE
from tests.unit.attention.ragged_batch import FEATURES, SCALE, RaggedBatch, ragged_batch, starts_of

# Lengths around the edges of tiles: a prompt of one token, no context, no keys at all, no queries.
QUERIES, KEYS = [5, 16, 1, 3, 0, 40], [9, 16, 1, 0, 20, 105]


def attend(
    batch: RaggedBatch,
    features: KernelFeatures,
    *,
    k_SKD: Tensor | None = None,
    v_SKV: Tensor | None = None,
    max_query_len: int | None = None,
) -> None:
    ragged_attention(
        batch.queries,
        torch.cat(batch.k).to(DEVICE) if k_SKD is None else k_SKD,
        torch.cat(batch.v).to(DEVICE) if v_SKV is None else v_SKV,
        query_start_loc=batch.query_start_loc,
        key_start_loc=starts_of([len(keys) for keys in batch.k]),
        max_query_len=max_query_len or max(batch.query_lens),
        causal=features.causal,
        scale=SCALE,
        sliding_window=features.sliding_window,
        attention_chunk_size=features.attention_chunk_size,
        logits_soft_cap=features.logits_soft_cap,
        alibi_slopes_H=features.alibi_slopes_H,
        sinks_H=features.sinks_H,
        out=batch.out_THV,
        lse_HT=batch.lse_HT,
    )


def part(batch: RaggedBatch, requests: slice, tokens: slice) -> RaggedBatch:
    return RaggedBatch(
        batch.q[requests], batch.k[requests], batch.v[requests], batch.out_THV[tokens], batch.lse_HT[:, tokens]
    )


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_equals_its_definition(name: str) -> None:
    batch = ragged_batch(QUERIES, KEYS)
    attend(batch, FEATURES[name])
    batch.check(FEATURES[name])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("none", torch.float16), ("none", torch.bfloat16), ("not causal", torch.float16), ("all", torch.bfloat16)],
)
def test_sixteen_bits_are_as_exact_as_they_can_be(name: str, dtype: torch.dtype) -> None:
    batch = ragged_batch(QUERIES, KEYS, head_size=64, dtype=dtype)
    attend(batch, FEATURES[name])
    batch.check(FEATURES[name])


@pytest.mark.parametrize("sizes", [(192, 128), (80, 80), (96, 96), (112, 112), (256, 256), (16, 48)])
def test_any_head_size_and_another_one_for_values(sizes: tuple[int, int]) -> None:
    batch = ragged_batch([40], [70], num_heads=2, head_size=sizes[0], value_size=sizes[1], dtype=torch.float16)
    attend(batch, KernelFeatures())
    batch.check(KernelFeatures())


@pytest.mark.parametrize("heads", [(1, 1), (5, 1), (6, 2), (40, 1)])
def test_any_number_of_query_heads_shares_a_kv_head(heads: tuple[int, int]) -> None:
    batch = ragged_batch([20, 2], [50, 2], num_heads=heads[0], num_kv_heads=heads[1], head_size=64, dtype=torch.float16)
    attend(batch, KernelFeatures())
    batch.check(KernelFeatures())


@pytest.mark.parametrize("head_size", [16, 64])
def test_keys_and_values_may_be_slices_of_wider_tensors(head_size: int) -> None:
    batch = ragged_batch([20, 40], [20, 60], head_size=head_size, dtype=torch.float16)
    k_SKD, v_SKV = torch.cat(batch.k), torch.cat(batch.v)
    wide = torch.cat([torch.full_like(k_SKD, torch.nan), k_SKD, v_SKV], -1).to(DEVICE)
    k_heads_first = k_SKD.transpose(0, 1).contiguous().to(DEVICE).transpose(0, 1)
    attend(batch, KernelFeatures(), k_SKD=wide[..., head_size : 2 * head_size], v_SKV=wide[..., 2 * head_size :])
    batch.check(KernelFeatures())
    batch.out_THV.fill_(torch.nan)
    attend(batch, KernelFeatures(), k_SKD=k_heads_first, v_SKV=wide[..., 2 * head_size :])
    batch.check(KernelFeatures())


@pytest.mark.parametrize("most_queries", [60, 2**15])
def test_narrow_heads_at_any_address_are_read(most_queries: int) -> None:
    """Keys of 20 channels, and values of 10 that begin at any even address, as in a tiny latent model."""
    batch = ragged_batch(
        [20, 60, 60, 60], [20, 60, 60, 60], num_kv_heads=4, head_size=20, value_size=10, dtype=torch.bfloat16
    )
    v_SKV = torch.cat(batch.v)
    wide = torch.cat([torch.full_like(v_SKV, torch.nan), torch.full_like(v_SKV[..., :2], torch.nan), v_SKV], -1)
    for _ in range(3):  # what a run leaves in a GPU's memory changes no later one
        batch.out_THV.fill_(torch.nan)
        attend(batch, KernelFeatures(), v_SKV=wide.to(DEVICE)[..., 12:], max_query_len=most_queries)
        batch.check(KernelFeatures())


def test_keys_at_any_address_are_read() -> None:
    """The copy engine of a GPU wants multiples of 16 bytes; without, results are the same."""
    batch = ragged_batch([20, 40], [20, 60], head_size=64, dtype=torch.float16)
    k_SKD = torch.cat(batch.k)
    odd = torch.empty(k_SKD.numel() + 1, dtype=k_SKD.dtype, device=DEVICE)[1:].view(k_SKD.shape).copy_(k_SKD)
    attend(batch, KernelFeatures(), k_SKD=odd)
    batch.check(KernelFeatures())


def test_the_output_is_the_same_without_log_sum_exp() -> None:
    batch = ragged_batch([20], [20])
    ragged_attention(
        batch.queries,
        batch.k[0].to(DEVICE),
        batch.v[0].to(DEVICE),
        query_start_loc=batch.query_start_loc,
        key_start_loc=starts_of([20]),
        max_query_len=64,
        causal=True,
        scale=SCALE,
        out=batch.out_THV,
    )
    assert batch.lse_HT.isnan().all()
    assert batch.out_THV[:20].isfinite().all()


def test_padded_requests_have_no_effect() -> None:
    """As in a CUDA graph that was captured for more requests and tokens than the batch has."""
    batch = ragged_batch([4, 9], [4, 30])
    ragged_attention(
        batch.queries,
        torch.cat(batch.k).to(DEVICE),
        torch.cat(batch.v).to(DEVICE),
        query_start_loc=torch.tensor([0, 4, 13, 13, 13], dtype=torch.int32, device=DEVICE),
        key_start_loc=torch.tensor([0, 4, 34, 34, 34], dtype=torch.int32, device=DEVICE),
        max_query_len=16,
        causal=True,
        scale=SCALE,
        out=batch.out_THV,
        lse_HT=batch.lse_HT,
    )
    batch.check(KernelFeatures())


def test_requests_after_others_leave_those_alone() -> None:
    """As the prefills of a batch whose first requests are decodes, more of these than a tile has tokens."""
    batch = ragged_batch([1] * 300 + [4, 3], [1] * 300 + [4, 3], head_size=64, dtype=torch.float16)
    ragged_attention(
        batch.queries,
        torch.cat(batch.k).to(DEVICE),
        torch.cat(batch.v).to(DEVICE),
        query_start_loc=batch.query_start_loc[300:],
        key_start_loc=batch.query_start_loc[300:],
        max_query_len=4,
        causal=True,
        scale=SCALE,
        out=batch.out_THV,
        lse_HT=batch.lse_HT,
    )
    assert batch.out_THV[:300].isnan().all()
    assert batch.lse_HT[:, :300].isnan().all()
    part(batch, slice(300, None), slice(300, None)).check(KernelFeatures())


@pytest.mark.parametrize("name", ["none", "not causal"])
def test_nan_reaches_no_other_request(name: str) -> None:
    """Neither NaN in the next request's rows, nor NaN in the padding after the last one's."""
    batch = ragged_batch([20, 40, 5], [20, 60, 30], head_size=64, dtype=torch.float16)
    k_SKD, v_SKV = (torch.cat([*rows, rows[0][:9]]).to(DEVICE) for rows in (batch.k, batch.v))
    for rows in (k_SKD, v_SKV):
        rows[20:80] = torch.nan
        rows[110:] = torch.nan
    attend(batch, FEATURES[name], k_SKD=k_SKD, v_SKV=v_SKV)
    part(batch, slice(1), slice(20)).check(FEATURES[name])
    part(batch, slice(2, None), slice(60, None)).check(FEATURES[name])
