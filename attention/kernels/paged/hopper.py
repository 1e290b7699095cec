"""How `unified_hopper_kernel` is launched: keys as rows for the copy engine, and sizes that fit the shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attention.kernels.paged.call import LOG2E, Call, split_channels
from attention.kernels.paged.hopper_kernel import attend_tile
from attention.kernels.tma_rows import as_rows

_TILE_ROWS = 128


@dataclass(frozen=True)
class HopperTiling:
    """Attributes:
    block_n: keys of a tile, of which `stages` are in flight.
    pack: query heads of a kv head that share a tile's rows.
    """

    block_n: int
    stages: int
    pack: int


def choose_tiling(call: Call) -> HopperTiling:
    """Measured on an H200: 128 keys and two buffers are best where they fit, and heads share tiles at no cost."""
    channels = max(call.q_THD.shape[-1], call.keys.values.shape[-1])
    fits = channels <= 192 and call.keys.values.shape[-1] <= 128
    return HopperTiling(block_n=128 if fits else 64, stages=2, pack=min(call.group, _TILE_ROWS))


def launch(call: Call, tiling: HopperTiling | None = None) -> bool:
    """Whether it could be: else nothing is done."""
    q_THD, keys, features = call.q_THD, call.keys, call.features
    head_size, value_size = q_THD.shape[-1], keys.values.shape[-1]
    if max(head_size, value_size) > 256 or min(head_size, value_size) < 64 or not _are_blocks_of_tiles(keys.block_size):
        return False
    k, v = as_rows(keys.keys), as_rows(keys.values)
    if k is None or v is None:
        return False
    tiling = tiling or choose_tiling(call)
    block_a, block_p = split_channels(head_size)
    block_v = triton.next_power_of_2(value_size)
    piece = min(keys.block_size or tiling.block_n, tiling.block_n)
    num_packs, num_tiles = call.num_packs(tiling.pack), call.num_tiles(_TILE_ROWS // tiling.pack)
    soft_cap = features.logits_soft_cap
    attend_tile[(num_tiles * num_packs,)](
        _descriptor(k.rows, piece, block_a),
        _descriptor(k.rows, piece, block_p) if block_p else None,
        _descriptor(v.rows, piece, block_v),
        q_THD,
        call.out,
        call.lse_HT,
        call.query_start_loc,
        keys.key_start_loc,
        keys.seq_lens,
        keys.block_table,
        features.alibi_slopes_H,
        features.sinks_H,
        call.scale * LOG2E * (2 / soft_cap if soft_cap else 1),
        (soft_cap or 0.0) * LOG2E,
        call.num_reqs,
        num_tiles,
        num_packs,
        call.section(tiling.pack),
        keys.block_size or 1,
        *k.places,
        *v.places,
        call.table_stride,
        *q_THD.stride()[:2],
        *call.out.stride()[:2],
        *call.lse_strides,
        GROUP=call.group,
        PACK=tiling.pack,
        KEY_SIZE=head_size,
        VALUE_SIZE=value_size,
        BLOCK_A=block_a,
        BLOCK_P=block_p,
        BLOCK_V=block_v,
        BLOCK_N=tiling.block_n,
        PIECE=piece,
        STAGES=tiling.stages,
        CAUSAL=features.causal,
        WINDOW=features.sliding_window or 0,
        CHUNK=features.attention_chunk_size or 0,
        SOFT_CAP=bool(soft_cap),
        num_warps=4,
    )
    return True


def _are_blocks_of_tiles(block_size: int) -> bool:
    """Whether a tile is whole blocks, or a block whole tiles; none (0) is fine."""
    return block_size % 128 == 0 or block_size in (8, 16, 32, 64)


def _descriptor(rows: Tensor, piece: int, channels: int) -> TensorDescriptor:
    dtype = gl.bfloat16 if rows.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([piece, channels], dtype)
    return TensorDescriptor.from_tensor(rows, [piece, channels], layout)
