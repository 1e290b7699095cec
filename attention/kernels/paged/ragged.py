"""Attention of several requests' queries over keys and values that lie side by side. Knows tensors only."""

from torch import Tensor

from attention.kernels.paged.call import Call, Features, Keys
from attention.kernels.paged.launch import attend


def ragged_attention(
    q_THD: Tensor,
    k_SHD: Tensor,
    v_SHV: Tensor,
    *,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    max_query_len: int,
    causal: bool,
    scale: float,
    sliding_window: int | None = None,
    attention_chunk_size: int | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes_H: Tensor | None = None,
    sinks_H: Tensor | None = None,
    out: Tensor,
    lse_HT: Tensor | None = None,
) -> None:
    """Writes `out` [T, H, V] and, if given, `lse_HT` for the tokens that `query_start_loc` counts; other rows stay.

    Features are as `attention.parameters` defines them, where a request's last query sits at its last key; a
    log-sum-exp counts the sinks. A window hides only what lies before it.

    Args:
        k_SHD, v_SHV: any strides but a last one of 1. NaN in a request's rows may reach all of its
            tokens, and no other's.
        query_start_loc, key_start_loc: [R + 1] int32, from any token and key on.
        max_query_len: a bound that may be too large, at the cost of time.
    """
    attend(
        Call(
            q_THD,
            Keys(
                k_SHD.unsqueeze(0),
                v_SHV.unsqueeze(0),
                key_start_loc=key_start_loc,
                seq_lens=None,
                block_table=None,
                expected_len=k_SHD.shape[0] // max(1, key_start_loc.shape[0] - 1),
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
            ),
            out=out,
            lse_HT=lse_HT,
        )
    )
