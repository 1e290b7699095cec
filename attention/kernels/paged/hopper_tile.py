"""The work of a program of the Hopper kernels of attention over a batch: a tile of queries, the keys that it sees, and
shared memory with rings for keys and values.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


class Sizes(NamedTuple):
    """Constant sizes. Key channels are padded and split into `block_a` and `block_p`, which may be 0; the copy engine
    copies `piece` keys at a time."""

    key_size: int
    value_size: int
    group: int
    pack: int
    block_a: int
    block_p: int
    block_v: int
    block_n: int
    piece: int
    stages: int


class AttentionTile(NamedTuple):
    """A program's queries, and the keys [first_key, stop_key) that some of the queries see. From `head` on, the kv head
    has `heads_left` query heads."""

    query_start: gl.tensor
    query_len: gl.tensor
    first_token: gl.tensor
    kv_head: gl.tensor
    head: gl.tensor
    heads_left: gl.tensor
    seq_len: gl.tensor
    first_key: gl.tensor
    stop_key: gl.tensor


class TileBuffers(NamedTuple):
    """Shared memory of a program: the warpgroups' queries, the rings of keys and values, and their barriers."""

    q_A: gl.shared_memory_descriptor
    q_P: gl.shared_memory_descriptor
    k_A: gl.shared_memory_descriptor
    k_P: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    full_k: gl.shared_memory_descriptor
    empty_k: gl.shared_memory_descriptor
    full_v: gl.shared_memory_descriptor
    empty_v: gl.shared_memory_descriptor


@gluon.jit
def new_buffers(dtype: gl.constexpr, sizes: gl.constexpr, QUERY_TILES: gl.constexpr):
    """Allocates a program's shared memory, with room for the queries of so many tiles, and initialises its barriers."""
    ROWS: gl.constexpr = 64
    BLOCK_N: gl.constexpr = sizes.block_n
    STAGES: gl.constexpr = sizes.stages
    layout_A: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, sizes.block_a], dtype)
    layout_V: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, sizes.block_v], dtype)
    tiles_QA = gl.allocate_shared_memory(dtype, [2 * QUERY_TILES, ROWS, sizes.block_a], layout_A)
    tiles_A = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, sizes.block_a], layout_A)
    tiles_QP, tiles_P = tiles_QA, tiles_A
    if sizes.block_p:
        layout_P: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, sizes.block_p], dtype)
        tiles_QP = gl.allocate_shared_memory(dtype, [2 * QUERY_TILES, ROWS, sizes.block_p], layout_P)
        tiles_P = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, sizes.block_p], layout_P)
    tiles_V = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, sizes.block_v], layout_V)
    full_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full_k.index(stage), count=1)
        mbarrier.init(empty_k.index(stage), count=2)
        mbarrier.init(full_v.index(stage), count=1)
        mbarrier.init(empty_v.index(stage), count=2)

    return TileBuffers(tiles_QA, tiles_QP, tiles_A, tiles_P, tiles_V, full_k, empty_k, full_v, empty_v)


@gluon.jit
def seen_by(first_position, last_position, seq_len, BLOCK_N: gl.constexpr, mask: gl.constexpr):
    """Returns keys [first, stop) that some query between the positions sees, and tiles [full_start, full_stop) that all
    queries see."""
    CAUSAL: gl.constexpr = mask.causal
    WINDOW: gl.constexpr = mask.window
    CHUNK: gl.constexpr = mask.chunk
    first = 0
    full_first = 0
    if WINDOW:
        first = gl.maximum(first_position - WINDOW + 1, 0)
        full_first = gl.maximum(last_position - WINDOW + 1, 0)
    if CHUNK:
        first = gl.maximum(first_position // CHUNK * CHUNK, first)
        full_first = gl.maximum(last_position // CHUNK * CHUNK, full_first)
    stop = seq_len
    full_stop = seq_len
    if CAUSAL:
        stop = gl.maximum(last_position + 1, 0)
        full_stop = gl.maximum(first_position + 1, 0)
    elif WINDOW:
        stop = gl.maximum(gl.minimum(last_position + WINDOW, seq_len), 0)
        full_stop = gl.maximum(gl.minimum(first_position + WINDOW, seq_len), 0)
    return first, stop, gl.cdiv(full_first, BLOCK_N), full_stop // BLOCK_N
