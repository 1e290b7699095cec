"""The tiling and the launch of the portable kernel of attention over a batch.

The kernel has every feature; it is compiled without those that a call does not use. Legend: R requests, M rows of a
tile (tokens times the query heads that share a kv head), N keys of a tile, D and P the two parts of the key channels, V
value channels.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.paged.call import AttentionCall, rows_of, split_channels
from attention.kernels.paged.portable_keys import KeyRows
from attention.kernels.paged.portable_tile import attend_tile
from attention.kernels.paged.split import LEAST_KEYS, merge_splits, new_partials
from baton.kvcache.fp8 import is_fp8
from baton.tritonlib.launch import interpreted

_TRITON_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# NOTE: with keys of 20 channels and values of 10, tiles of 32 and 16 channels gave wrong results on an H200 (Triton
# 3.6), from the 17th key of a tile on. The first parts of keys, and values, have this many channels at least if they
# are numbers of 16 bits; second parts of 16 and 32 channels were right.
_LEAST_CHANNELS = 64


@dataclass(frozen=True)
class Tiling:
    """The tile sizes of the portable kernel.

    Attributes:
        block_m, block_n: rows and keys of a tile; `pack` query heads of a kv head share the rows.
    """

    block_m: int
    block_n: int
    pack: int
    num_warps: int
    num_stages: int


def choose_tiling(call: AttentionCall) -> Tiling:
    """Chooses the first shape that fits from a list sorted by speed on an H200."""
    element_bytes = 2 if is_fp8(call.q_THD) else call.q_THD.element_size()
    # Split calls have few shapes, because an eager step compiles each at its first use.
    rows = max(16 if call.splits == 1 else 64, triton.next_power_of_2(call.max_query_len * call.group))
    # float32 products are unrolled into registers and spill unless tiles are small.
    block_m = min(rows, 32 if element_bytes > 2 else 128)
    key_channels, value_channels = sum(_key_channels(call)), _value_channels(call)
    channels = key_channels + value_channels
    room = _shared_bytes(call.q_THD.device) - block_m * key_channels * element_bytes
    shapes = ((16, 2),) if element_bytes > 2 else ((64, 3), (64, 2), (32, 2))
    fitting = (shape for shape in shapes if shape[0] * shape[1] * channels * element_bytes <= room)
    block_n, num_stages = next(fitting, (16, 1))
    return Tiling(
        block_m=block_m,
        block_n=block_n,
        pack=min(call.group, block_m),
        num_warps=8 if block_m == 128 else 4,
        num_stages=num_stages,
    )


def _least_channels(call: AttentionCall) -> int:
    return 16 if call.q_THD.dtype == torch.float32 or interpreted() else _LEAST_CHANNELS


def _key_channels(call: AttentionCall) -> tuple[int, int]:
    """The channels of a tile's keys, in two parts; the second may be 0."""
    size, least = call.q_THD.shape[-1], _least_channels(call)
    return (least, 0) if size <= least else split_channels(size)


def _value_channels(call: AttentionCall) -> int:
    return max(_least_channels(call), int(triton.next_power_of_2(call.keys.values.shape[-1])))


def _shared_bytes(device: torch.device) -> int:
    """Returns the shared memory that a program's tiles may fill; the driver takes 1 KB, reductions 2 KB."""
    if device.type != "cuda":
        return 64 * 1024
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor - 3 * 1024


class _Scoring(NamedTuple):
    """The factors from products to scores, and from weights to outputs. A feature that is None is not compiled."""

    scale: float
    soft_cap: float | None
    alibi_slopes_ptr: Tensor | None
    sinks_ptr: Tensor | None
    q_scale_ptr: Tensor | None
    k_scale_ptr: Tensor | None
    v_scale_ptr: Tensor | None


class _Sizes(NamedTuple):
    """Constant sizes. In a tile, `pack` query heads share `block_m` rows. Channels are padded; key channels are split
    into `block_d` and `block_p`, which may be 0. `block_size` is the cache's, 0 without blocks. Programs that share
    a tile's keys have `least_keys` or more each."""

    key_size: int
    value_size: int
    group: int
    pack: int
    block_size: int
    block_m: int
    block_n: int
    block_d: int
    block_p: int
    block_v: int
    block_r: int
    least_keys: int


class _Types(NamedTuple):
    """Constants: the dtypes in which keys and values are multiplied."""

    k: tl.dtype
    v: tl.dtype
    interpreted: bool


def launch(call: AttentionCall, tiling: Tiling | None = None) -> None:
    """Launches the kernel, and the merge of its results if the call's keys are split."""
    tiling = tiling or choose_tiling(call)
    q_THD, keys, features = call.q_THD, call.keys, call.features
    head_size, value_size = q_THD.shape[-1], keys.values.shape[-1]
    block_d, block_p = _key_channels(call)
    tiles = call.tiles(tiling.block_m, tiling.pack)
    partials = new_partials(call)
    attend_tile[(tiles.num_tiles * tiles.num_packs, call.splits)](
        rows_of(q_THD),
        KeyRows(keys.keys, *keys.keys.stride()[:3]),
        KeyRows(keys.values, *keys.values.stride()[:3]),
        rows_of(call.out),
        partials,
        _Scoring(
            call.scale,
            features.logits_soft_cap,
            features.alibi_slopes_H,
            features.sinks_H,
            features.q_scale,
            features.k_scale,
            features.v_scale,
        ),
        *call.lse,
        *call.requests,
        *tiles,
        q_THD.shape[0],
        sizes=_Sizes(
            key_size=head_size,
            value_size=value_size,
            group=call.group,
            pack=tiling.pack,
            block_size=keys.block_size,
            block_m=tiling.block_m,
            block_n=tiling.block_n,
            block_d=block_d,
            block_p=block_p,
            block_v=_value_channels(call),
            block_r=min(256, max(16, triton.next_power_of_2(call.num_reqs))),
            least_keys=LEAST_KEYS,
        ),
        mask=call.mask,
        types=_multiplied_as(q_THD.dtype, keys.keys.dtype),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    merge_splits(call, partials)


def _multiplied_as(q_dtype: torch.dtype, kv_dtype: torch.dtype) -> _Types:
    """Returns the dtypes of both products. 8-bit numbers are multiplied in float16, which represents all of them."""
    if interpreted():
        return _Types(tl.float32, tl.float32, interpreted=True)
    k_type = _TRITON_TYPES.get(q_dtype, _TRITON_TYPES.get(kv_dtype, tl.float16))
    v_type = _TRITON_TYPES.get(kv_dtype, tl.float32 if q_dtype == torch.float32 else tl.float16)
    return _Types(k_type, v_type, interpreted=False)
