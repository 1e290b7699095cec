"""Attention of any mix of prefills and decodes, over the paged cache or over contiguous keys.

Both entry points make one `AttentionCall` and start the fastest kernel that can run it.
"""

import torch
from torch import Tensor

from attention.kernels.paged import portable, probe
from attention.kernels.paged.call import AttentionCall, KernelFeatures, Keys
from attention.kernels.paged.work_list import WorkList
from baton.tritonlib.hopper_check import HopperKernels, has_hopper_kernels

_HOPPER = HopperKernels("attention over a batch", probe.compare_on_hopper)


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
    work: WorkList | None = None,
    splits: int = 1,
) -> None:
    """Writes `out` [T, H, D] and, if given, `lse_HT` for the tokens that `query_start_loc` counts; other rows are
    unchanged.

    Features are as `attention.parameters` defines them; a log-sum-exp includes the sinks. Without `causal`, a window
    has two sides, as in an encoder.

    Args:
        kv_layer: [2, B, N, H, D], channels adjacent; may be fp8, whose scales are read on the device.
        query_start_loc, seq_lens: [R + 1] and [R] int32, starting at any token. A request without queries is padding,
            and nothing is read for it. Queries of a request of length 0 get outputs of 0.
        max_query_len: an upper bound; too large a bound costs time.
        work: the tiles of these requests, if a persistent kernel may run them.
        splits: number of programs that share a tile's keys, see `attention.kernels.paged.split`.
    """
    keys, values = kv_layer.unbind(0)
    _attend(
        AttentionCall(
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
            features=KernelFeatures(
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
            work=work,
            splits=splits,
        )
    )


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
    work: WorkList | None = None,
) -> None:
    """Writes `out` [T, H, V] and, if given, `lse_HT` for the tokens that `query_start_loc` counts; other rows are
    unchanged.

    Features are as `attention.parameters` defines them, with a request's last query at its last key's position; a
    log-sum-exp includes the sinks. Without `causal`, a window has two sides, as in an encoder.

    Args:
        k_SHD, v_SHV: channels adjacent. NaN in a request's rows may reach all tokens of that request, but of no other.
        query_start_loc, key_start_loc: [R + 1] int32, starting at any token and key.
        max_query_len: an upper bound; too large a bound costs time.
        work: the tiles of these requests, if a persistent kernel may run them; only if `key_start_loc` is
            `query_start_loc`.
    """
    assert work is None or key_start_loc is query_start_loc
    _attend(
        AttentionCall(
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
            features=KernelFeatures(
                causal=causal,
                sliding_window=sliding_window,
                attention_chunk_size=attention_chunk_size,
                logits_soft_cap=logits_soft_cap,
                alibi_slopes_H=alibi_slopes_H,
                sinks_H=sinks_H,
            ),
            out=out,
            lse_HT=lse_HT,
            work=work,
        )
    )


def _attend(call: AttentionCall) -> None:
    if not call.q_THD.shape[0] or not call.num_reqs:
        return
    if _may_run_on_hopper(call):
        from attention.kernels.paged import hopper, persistent

        if call.splits == 1 and call.work is not None and persistent.launch(call, call.work):
            return
        if hopper.launch(call):
            return
    portable.launch(call)


def _may_run_on_hopper(call: AttentionCall) -> bool:
    q_THD = call.q_THD
    return (
        q_THD.dtype in (torch.bfloat16, torch.float16)
        and call.keys.keys.dtype == q_THD.dtype
        and has_hopper_kernels(q_THD.device, _HOPPER)
    )
