"""The gated delta rule of prompts on a GPU, sub-chunk by sub-chunk (arXiv 2412.06464, section 3.3).

Within a sub-chunk, the corrections that tokens make to one another are the solution of a triangular system. What needs
no state is computed for all sub-chunks side by side, in `gated_delta_systems`. Then one program for a tile of a state's
values goes through the sub-chunks of a prompt. Sub-chunks are cut at absolute positions, so the bits do not depend on
cuts of prompts at multiples of CHUNK. The twin is in `baton.models.layers.recurrent.gated_delta`. Legend: as there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.models.kernels.recurrent.gated_delta_systems import CHUNK, systems
from baton.models.kernels.recurrent.snapshots import snapshot_slot
from baton.models.kernels.recurrent.state_rows import StateRows
from baton.tritonlib.launch import bound, interpreted
from baton.tritonlib.rounding import round_to

_TILE_V = 32
_NUM_WARPS = 8


def prompts(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THRV: Tensor,
    log_decay: Tensor,
    beta_THR: Tensor,
    out_THRV: Tensor,
    states_SHRKV: Tensor,
    rows: StateRows,
) -> None:
    """Writes the outputs of the prompts' tokens, and their states.

    Args:
        log_decay, beta_THR, out_THRV: contiguous.
    """
    _, heads, per_head, values = v_THRV.shape
    keys = q_THK.shape[2]
    precision = "tf32x3" if v_THRV.dtype == torch.float32 else "tf32"
    known = systems(q_THK, k_THK, log_decay, beta_THR, rows, precision=precision)
    tile = max(16, min(_TILE_V, triton.next_power_of_2(values)))
    _scan[(len(rows.prompt_slots_P), heads * per_head, triton.cdiv(values, tile))](
        v_THRV,
        beta_THR,
        known.inverses_THRJ,
        known.products_THRJ,
        known.totals,
        known.queries_THRK,
        known.keys_THRK,
        known.left_THRK,
        out_THRV,
        states_SHRKV,
        rows.prompt_slots_P,
        rows.prompt_starts_P1,
        rows.prompt_context_P,
        rows.snapshot_slots_PM,
        rows.snapshot_lens_PM,
        *v_THRV.stride()[:3],
        *states_SHRKV.stride(),
        VALUES=values,
        TILE_V=tile,
        SNAPSHOTS=rows.snapshot_slots_PM.shape[1],
        HEADS=heads,
        PER_HEAD=per_head,
        KEYS=keys,
        BLOCK_K=max(16, triton.next_power_of_2(keys)),
        CHUNK=CHUNK,
        BY_CHANNEL=log_decay.dim() == 4,
        PRECISION=precision,
        INTERPRETED=interpreted(),
        num_warps=_NUM_WARPS,
        num_stages=1,  # the kernel loads ahead itself: two stages exceed the shared memory
    )


@triton.jit
def _scan(
    v_ptr,
    beta_ptr,
    inverses_ptr,
    products_ptr,
    totals_ptr,
    queries_ptr,
    keys_ptr,
    left_ptr,
    out_ptr,
    state_ptr,
    slots_ptr,
    starts_ptr,
    context_ptr,
    snapshot_slots_ptr,
    snapshot_lens_ptr,
    v_stride_T,
    v_stride_H,
    v_stride_R,
    state_stride_S,
    state_stride_H,
    state_stride_R,
    state_stride_K,
    state_stride_V,
    VALUES: tl.constexpr,
    TILE_V: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
    HEADS: tl.constexpr,
    PER_HEAD: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """All sub-chunks of one prompt, for TILE_V values of one value head."""
    prompt = tl.program_id(0)
    value_head = tl.program_id(1)
    head = value_head // PER_HEAD
    slot = tl.load(slots_ptr + prompt).to(tl.int64)
    start = tl.load(starts_ptr + prompt)
    stop = tl.load(starts_ptr + prompt + 1)
    context = tl.load(context_ptr + prompt)
    if (slot >= 0) & (start < stop):
        i_I = tl.arange(0, CHUNK)
        k_K = tl.arange(0, BLOCK_K)
        v_V = tl.program_id(2) * TILE_V + tl.arange(0, TILE_V)
        has_V = v_V < VALUES
        state_ptrs_KV = (
            state_ptr
            + slot * state_stride_S
            + head * state_stride_H
            + (value_head % PER_HEAD) * state_stride_R
            + k_K[:, None] * state_stride_K
            + v_V[None, :] * state_stride_V
        )
        has_KV = (k_K < KEYS)[:, None] & has_V[None, :]
        state_KV = tl.load(state_ptrs_KV, mask=has_KV & (context > 0), other=0.0)
        VALUE_HEADS: tl.constexpr = HEADS * PER_HEAD
        gates_I = i_I * VALUE_HEADS
        places_IK = (gates_I * KEYS)[:, None] + k_K[None, :]
        places_IJ = (gates_I * CHUNK)[:, None] + i_I[None, :]
        has_K, has_J = k_K < KEYS, i_I < CHUNK
        v_ptr += head * v_stride_H + (value_head % PER_HEAD) * v_stride_R
        aligned = start - context % CHUNK
        # What a product has read is loaded again at once, for the next sub-chunk: that wait overlaps the products.
        gate, count = _sub_chunk(aligned, start, stop, value_head, VALUE_HEADS, CHUNK)
        keys_IK = _rows(keys_ptr + gate * KEYS + places_IK, i_I < count, has_K)
        queries_IK = _rows(queries_ptr + gate * KEYS + places_IK, i_I < count, has_K)
        inverse_IJ = _rows(inverses_ptr + gate * CHUNK + places_IJ, i_I < count, has_J)
        left_IK = _rows(left_ptr + gate * KEYS + places_IK, i_I < count, has_K)
        products_IJ = _rows(products_ptr + gate * CHUNK + places_IJ, i_I < count, has_J)
        for _ in range(bound((stop - aligned + CHUNK - 1) // CHUNK, INTERPRETED)):
            first = tl.maximum(aligned, start)
            gate, count = _sub_chunk(aligned, start, stop, value_head, VALUE_HEADS, CHUNK)
            aligned += CHUNK
            next_gate, next_count = _sub_chunk(aligned, start, stop, value_head, VALUE_HEADS, CHUNK)
            has_I, has_next_I = i_I < count, i_I < next_count
            has_IV = has_I[:, None] & has_V[None, :]
            v_ptrs_IV = v_ptr + first.to(tl.int64) * v_stride_T + (i_I * v_stride_T)[:, None] + v_V[None, :]
            v_IV = tl.load(v_ptrs_IV, mask=has_IV, other=0.0).to(tl.float32)
            beta_I = tl.load(beta_ptr + gate + gates_I, mask=has_I, other=0.0)
            last_gate = gate + (count - 1) * VALUE_HEADS
            if BY_CHANNEL:
                last_X = tl.load(totals_ptr + last_gate * KEYS + k_K, mask=has_K, other=0.0)
            else:
                last_X = tl.zeros([1], tl.float32) + tl.load(totals_ptr + last_gate)
            answer_IV = tl.dot(keys_IK, state_KV, input_precision=PRECISION)
            keys_IK = _rows(keys_ptr + next_gate * KEYS + places_IK, has_next_I, has_K)
            out_IV = tl.dot(queries_IK, state_KV, input_precision=PRECISION)
            queries_IK = _rows(queries_ptr + next_gate * KEYS + places_IK, has_next_I, has_K)
            wanted_IV = (v_IV - answer_IV) * beta_I[:, None]
            written_IV = tl.dot(inverse_IJ, wanted_IV, input_precision=PRECISION)
            inverse_IJ = _rows(inverses_ptr + next_gate * CHUNK + places_IJ, has_next_I, has_J)
            state_KV *= tl.exp2(last_X)[:, None]
            state_KV += tl.dot(tl.trans(left_IK), written_IV, input_precision=PRECISION)
            left_IK = _rows(left_ptr + next_gate * KEYS + places_IK, has_next_I, has_K)
            out_IV += tl.dot(products_IJ, written_IV, input_precision=PRECISION)
            products_IJ = _rows(products_ptr + next_gate * CHUNK + places_IJ, has_next_I, has_J)
            out_IV = round_to(out_IV, out_ptr.dtype.element_ty, INTERPRETED)
            out_ptrs_IV = out_ptr + gate * VALUES + (gates_I * VALUES)[:, None] + v_V[None, :]
            tl.store(out_ptrs_IV, out_IV, mask=has_IV)
            length = aligned - start
            snapshot = snapshot_slot(snapshot_slots_ptr, snapshot_lens_ptr, prompt, length, SNAPSHOTS).to(tl.int64)
            if snapshot >= 0:
                tl.store(state_ptrs_KV + (snapshot - slot) * state_stride_S, state_KV, mask=has_KV)
        tl.store(state_ptrs_KV, state_KV, mask=has_KV)


@triton.jit
def _sub_chunk(aligned, start, stop, value_head, VALUE_HEADS: tl.constexpr, CHUNK: tl.constexpr):
    """The place of the first token's gates and the number of tokens, 0 or less after the last sub-chunk."""
    first = tl.maximum(aligned, start)
    return first.to(tl.int64) * VALUE_HEADS + value_head, tl.minimum(aligned + CHUNK, stop) - first


@triton.jit
def _rows(ptrs_IX, has_I, has_X):
    return tl.load(ptrs_IX, mask=has_I[:, None] & has_X[None, :], other=0.0)
