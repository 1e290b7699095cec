"""Attention over the paged cache for any mix of prefills and decodes, with every feature. Knows tensors only."""

from torch import Tensor

from attention.kernels.paged.call import Call, Features, Keys
from attention.kernels.paged.launch import attend


def unified_attention(
    q_THD: Tensor,
    kv_layer: Tensor,
    *,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_query_len: int,
    scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    attention_chunk_size: int | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes_H: Tensor | None = None,
    sinks_H: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor,
    lse_HT: Tensor | None = None,
) -> None:
    """Writes `out` [T, H, D] and, if given, `lse_HT` for the tokens that `query_start_loc` counts; other rows stay.

    Features are as `attention.parameters` defines them; a log-sum-exp counts the sinks. A window hides only what lies
    before it, so not causal means that all later keys are seen.

    Args:
        kv_layer: [2, B, N, H, D], any strides but a last one of 1; may be fp8, whose scales are read on the device.
        query_start_loc, seq_lens: [R + 1] and [R] int32, the first from any token on; a request without queries is
            padding, and nothing is read.
        max_query_len: a bound that may be too large, at the cost of time.
    """
    keys, values = kv_layer.unbind(0)
    attend(
        Call(
            q_THD,
            Keys(
                keys,
                values,
                key_start_loc=None,
                seq_lens=seq_lens,
                block_table=block_table,
                expected_len=block_table.shape[1] * keys.shape[1],
            ),
            query_start_loc=query_start_loc,
            max_query_len=max_query_len,
            scale=scale,
            features=Features(
                causal=causal,
                sliding_window=sliding_window,
                attention_chunk_size=attention_chunk_size,
                logits_soft_cap=logits_soft_cap,
                alibi_slopes_H=alibi_slopes_H,
                sinks_H=sinks_H,
                q_scale=q_scale,
                k_scale=k_scale,
                v_scale=v_scale,
            ),
            out=out,
            lse_HT=lse_HT,
        )
    )
