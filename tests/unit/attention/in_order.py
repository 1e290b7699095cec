"""Decodes in order for tests: a plan whose splits are short, and the call."""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from attention.kernels.decode.plan import DecodePlan, in_order_tiling, new_decode_plan, new_partials
from attention.kernels.in_order.decodes import attend_decodes
from attention.kernels.in_order.prompts import tile_tokens_of
from baton.tritonlib.hopper_check import is_hopper
from tests.device import DEVICE
from tests.unit.attention.paged import SCALE, Asked, Decodes


def in_order_plan(
    batch: Decodes, asked: Asked, *, rows: int, num_workers: int = 3, split_tiles: int = 1, max_splits: int = 0
) -> DecodePlan:
    """For up to `rows` rows, and any of them may be a decode."""
    _, num_heads, head_size = batch.q_RHD.shape
    tiling = in_order_tiling(head_size, batch.kv_layer.dtype, hopper=DEVICE == "cpu" or is_hopper(torch.device(DEVICE)))
    if batch.q_RHD.dtype == torch.float32:  # products of any size have the same bits
        tiling = replace(tiling, tile_keys=16)
    split_keys = split_tiles * tiling.tile_keys
    most = max_splits or int(batch.seq_lens.max()) // split_keys + 1
    partials = new_partials(
        max_num_reqs=rows,
        num_workers=num_workers,
        num_heads=num_heads,
        head_size=head_size,
        max_units=rows * (most + 1),
        device=batch.q_RHD.device,
    )
    return new_decode_plan(
        tiling=tiling,
        max_num_reqs=rows,
        num_workers=num_workers,
        partials=partials,
        sliding_window=asked.sliding_window,
        attention_chunk_size=asked.attention_chunk_size,
        split_keys=split_keys,
        max_splits=max_splits,
        tile_tokens=tile_tokens_of(num_heads // batch.kv_layer.shape[3]),
    )


def attend_in_order(
    batch: Decodes,
    asked: Asked,
    plan: DecodePlan,
    *,
    keys_axis: Literal[0, 1] | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    plan.fill(batch.seq_lens)
    out = torch.full_like(batch.q_RHD, torch.nan)
    attend_decodes(
        batch.q_RHD,
        batch.kv_layer,
        seq_lens=batch.seq_lens,
        block_table=batch.block_table,
        plan=plan,
        scale=SCALE,
        logits_soft_cap=asked.logits_soft_cap,
        alibi_slopes_H=asked.alibi_slopes_H,
        sinks_H=asked.sinks_H,
        k_scale=k_scale,
        v_scale=v_scale,
        keys_axis=keys_axis,
        out=out,
    )
    return out
