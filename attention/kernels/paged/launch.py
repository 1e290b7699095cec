"""Which kernel attends, and how tiles of queries are cut for the portable one; from shapes alone. Knows no batch."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from attention.kernels.paged.call import Call, split_channels
from attention.kernels.paged.kernel import attend_tile
from kvcache.fp8 import is_fp8
from tritonlib.launch import has_hopper_kernels, interpreted

_TRITON_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class Tiling:
    """Attributes:
    block_m, block_n: rows and keys of a tile; `pack` query heads of a kv head share the rows.
    """

    block_m: int
    block_n: int
    pack: int
    num_warps: int
    num_stages: int


def attend(call: Call) -> None:
    if not call.q_THD.shape[0] or not call.num_reqs:
        return
    if _may_run_on_hopper(call):
        from attention.kernels.paged import hopper as unified_hopper

        if unified_hopper.launch(call):
            return
    launch(call)


def _may_run_on_hopper(call: Call) -> bool:
    q_THD = call.q_THD
    return (
        q_THD.dtype in (torch.bfloat16, torch.float16)
        and call.keys.keys.dtype == q_THD.dtype
        and has_hopper_kernels(q_THD.device)
    )


def choose_tiling(call: Call) -> Tiling:
    """The first shape that fits, in the order of their speed on an H200."""
    element_bytes = 2 if is_fp8(call.q_THD) else call.q_THD.element_size()
    rows = max(16, triton.next_power_of_2(call.max_query_len * call.group))
    # Products of float32 are unrolled into registers, and spill unless tiles are small.
    block_m = min(rows, 32 if element_bytes > 2 else 128)
    key_channels = sum(split_channels(call.q_THD.shape[-1]))
    channels = key_channels + triton.next_power_of_2(call.keys.values.shape[-1])
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


def _shared_bytes(device: torch.device) -> int:
    """Shared memory that a program's tiles may fill; 1 KB is the driver's, 2 KB are left to reductions."""
    if device.type != "cuda":
        return 64 * 1024
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor - 3 * 1024


def _multiplied_as(q_dtype: torch.dtype, kv_dtype: torch.dtype) -> tuple[tl.dtype, tl.dtype]:
    """What keys and values are multiplied in: products of 8-bit numbers in float16, which holds all of them."""
    if interpreted():
        return tl.float32, tl.float32
    k_type = _TRITON_TYPES.get(q_dtype, _TRITON_TYPES.get(kv_dtype, tl.float16))
    v_type = _TRITON_TYPES.get(kv_dtype, tl.float32 if q_dtype == torch.float32 else tl.float16)
    return k_type, v_type


def launch(call: Call, tiling: Tiling | None = None) -> None:
    """The portable kernel."""
    q_THD, keys, features = call.q_THD, call.keys, call.features
    tiling = tiling or choose_tiling(call)
    head_size, value_size = q_THD.shape[-1], keys.values.shape[-1]
    block_d, block_p = split_channels(head_size)
    num_tiles = call.num_tiles(tiling.block_m // tiling.pack)
    k_type, v_type = _multiplied_as(q_THD.dtype, keys.keys.dtype)
    attend_tile[(num_tiles * call.num_packs(tiling.pack),)](
        q_THD,
        keys.keys,
        keys.values,
        call.out,
        call.lse_HT,
        call.query_start_loc,
        keys.key_start_loc,
        keys.seq_lens,
        keys.block_table,
        features.alibi_slopes_H,
        features.sinks_H,
        features.q_scale,
        features.k_scale,
        features.v_scale,
        call.scale,
        features.logits_soft_cap or 0.0,
        call.num_reqs,
        num_tiles,
        q_THD.shape[1],
        call.section(tiling.pack),
        *q_THD.stride()[:2],
        *keys.keys.stride()[:3],
        *keys.values.stride()[:3],
        *call.out.stride()[:2],
        *call.lse_strides,
        call.table_stride,
        KEY_SIZE=head_size,
        BLOCK_D=block_d,
        BLOCK_P=block_p,
        VALUE_SIZE=value_size,
        BLOCK_V=max(16, triton.next_power_of_2(value_size)),
        GROUP=call.group,
        PACK=tiling.pack,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_R=min(256, max(16, triton.next_power_of_2(call.num_reqs))),
        BLOCK_SIZE=keys.block_size,
        CAUSAL=features.causal,
        WINDOW=features.sliding_window or 0,
        CHUNK=features.attention_chunk_size or 0,
        SOFT_CAP=bool(features.logits_soft_cap),
        k_type=k_type,
        v_type=v_type,
        INTERPRETED=interpreted(),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
