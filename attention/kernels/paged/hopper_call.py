"""Prepares a call for both Hopper kernels of attention over a batch: tile sizes, matrices for the copy engine, and
constants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attention.kernels.paged.call import LOG2E, AttentionCall, split_channels
from attention.kernels.paged.hopper_attend import ScoreOptions
from attention.kernels.paged.hopper_tile import Sizes
from attention.kernels.tma_rows import as_rows

TILE_ROWS = 128


@dataclass(frozen=True)
class HopperTiling:
    """The tile sizes of the Hopper kernels.

    Attributes:
        block_n: keys of a tile; `stages` tiles are in flight.
        pack: query heads of a kv head that share a tile's rows.
    """

    block_n: int
    stages: int
    pack: int


def choose_tiling(call: AttentionCall) -> HopperTiling:
    """Chooses the tile by measurements on an H200: 128 keys and two buffers are best where they fit, and heads share
    tiles at no cost."""
    channels = max(call.q_THD.shape[-1], call.keys.values.shape[-1])
    fits = channels <= 192 and call.keys.values.shape[-1] <= 128
    return HopperTiling(block_n=128 if fits else 64, stages=2, pack=min(call.group, TILE_ROWS))


class HopperCall(NamedTuple):
    """The arguments that both Hopper kernels share."""

    matrices: tuple[TensorDescriptor, TensorDescriptor | None, TensorDescriptor]
    scoring: ScoreOptions
    places: tuple[int, ...]
    sizes: Sizes


def prepare(call: AttentionCall, tiling: HopperTiling) -> HopperCall | None:
    """Returns None if the kernels do not support the sizes or the keys' addresses and strides."""
    q_THD, keys, features = call.q_THD, call.keys, call.features
    head_size, value_size = q_THD.shape[-1], keys.values.shape[-1]
    if max(head_size, value_size) > 256 or min(head_size, value_size) < 64 or not _are_blocks_of_tiles(keys.block_size):
        return None
    k, v = as_rows(keys.keys), as_rows(keys.values)
    if k is None or v is None:
        return None
    block_a, block_p = split_channels(head_size)
    block_v = triton.next_power_of_2(value_size)
    piece = min(keys.block_size or tiling.block_n, tiling.block_n)
    soft_cap = features.logits_soft_cap
    return HopperCall(
        matrices=(
            _descriptor(k.rows, piece, block_a),
            _descriptor(k.rows, piece, block_p) if block_p else None,
            _descriptor(v.rows, piece, block_v),
        ),
        scoring=ScoreOptions(
            call.scale * LOG2E * (2 / soft_cap if soft_cap else 1),
            soft_cap * LOG2E if soft_cap else None,
            features.alibi_slopes_H,
            features.sinks_H,
        ),
        places=(*k.places, *v.places),
        sizes=Sizes(
            key_size=head_size,
            value_size=value_size,
            group=call.group,
            pack=tiling.pack,
            block_a=block_a,
            block_p=block_p,
            block_v=block_v,
            block_n=tiling.block_n,
            piece=piece,
            stages=tiling.stages,
        ),
    )


def _are_blocks_of_tiles(block_size: int) -> bool:
    """Whether a tile consists of whole blocks, or a block of whole tiles. True without blocks (0)."""
    return block_size % 128 == 0 or block_size in (8, 16, 32, 64)


def _descriptor(rows: Tensor, piece: int, channels: int) -> TensorDescriptor:
    dtype = gl.bfloat16 if rows.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([piece, channels], dtype)
    return TensorDescriptor.from_tensor(rows, [piece, channels], layout)
