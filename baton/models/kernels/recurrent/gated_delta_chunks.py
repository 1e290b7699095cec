"""The gated delta rule of prompts on a GPU, sub-chunk by sub-chunk (arXiv 2412.06464, section 3.3).

Within a sub-chunk, the corrections that tokens make to one another are the solution of a triangular system. What needs
no state is computed for all sub-chunks side by side, in `gated_delta_systems`. Then one program for a tile of a state's
values goes through the sub-chunks of a prompt. Sub-chunks are cut at absolute positions, so in steps of equal tiles the
bits do not depend on cuts of prompts at multiples of CHUNK. The twin is in
`baton.models.layers.recurrent.gated_delta`. Legend: as there.
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

_LEAST_OF_DOT = 16
# Programs for each tile of a state; each takes every fourth prompt, as a captured step has room for more than come.
_PROGRAMS = 4


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
    """Writes the outputs of the prompts' tokens, zeros after them, and the prompts' states.

    Args:
        log_decay, beta_THR, out_THRV: contiguous.
    """
    num_tokens, heads, per_head, values = v_THRV.shape
    keys = q_THK.shape[2]
    dtype = torch.float32 if v_THRV.dtype == torch.float32 else torch.float16
    known = systems(q_THK, k_THK, log_decay, beta_THR, rows, dtype=dtype)
    num_prompts = len(rows.prompt_slots_P)
    tile, num_warps, num_stages = _tile(num_prompts, dtype)
    tile = max(_LEAST_OF_DOT, min(tile, triton.next_power_of_2(values)))
    _walk[(min(num_prompts + 1, _PROGRAMS), heads * per_head, triton.cdiv(values, tile))](
        v_THRV,
        beta_THR,
        known.inverses_THRJ,
        known.products_THRJ,
        known.totals,
        known.rest_THR,
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
        num_prompts,
        num_tokens,
        keys**-0.5,
        *v_THRV.stride()[:3],
        *states_SHRKV.stride(),
        VALUES=values,
        TILE_V=tile,
        SNAPSHOTS=rows.snapshot_slots_PM.shape[1],
        HEADS=heads,
        PER_HEAD=per_head,
        KEYS=keys,
        BLOCK_K=max(_LEAST_OF_DOT, triton.next_power_of_2(keys)),
        CHUNK=CHUNK,
        STAGES=num_stages,
        BY_CHANNEL=known.left_THRK is not None,
        PRECISION="tf32x3",  # of float32; other numbers are multiplied as they are
        INTERPRETED=interpreted(),
        num_warps=num_warps,
    )


def _tile(num_prompts: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Returns values and warps of a program, and sub-chunks in flight.

    Small tiles spread a lone prompt over the GPU; larger ones read less for each value. A layer of Qwen3-Next on an
    H200 takes 668 us in tiles of 16 values and 920 us in tiles of 64 for one prompt of 8192 tokens, 720 and 385 us for
    eight prompts of 1024. So last bits may differ between steps with one prompt and with several.
    """
    if dtype == torch.float32:
        return 32, 8, 1
    return (16, 4, 2) if num_prompts == 1 else (64, 4, 2)


@triton.jit(do_not_specialize=["num_prompts", "num_tokens"])
def _walk(
    v_ptr,
    beta_ptr,
    inverses_ptr,
    products_ptr,
    totals_ptr,
    rest_ptr,
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
    num_prompts,
    num_tokens,
    scale,
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
    STAGES: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """All sub-chunks of one prompt, for TILE_V values of one value head. Values are rows of every product, so what one
    gives is what the next takes, in the same registers; only loaded numbers pass through shared memory."""
    dtype: tl.constexpr = keys_ptr.dtype.element_ty
    value_head = tl.program_id(1)
    head = value_head // PER_HEAD
    for prompt in range(tl.program_id(0), bound(num_prompts + 1, INTERPRETED), bound(tl.num_programs(0), INTERPRETED)):
        is_prompt = prompt < num_prompts
        slot = tl.load(slots_ptr + prompt, mask=is_prompt, other=-1).to(tl.int64)
        start = tl.load(starts_ptr + prompt)
        length = tl.load(starts_ptr + prompt + 1, mask=is_prompt, other=num_tokens) - start
        context = tl.load(context_ptr + prompt, mask=is_prompt, other=0)
        i_I = tl.arange(0, CHUNK)
        v_V = tl.program_id(2) * TILE_V + tl.arange(0, TILE_V)
        has_V = v_V < VALUES
        VALUE_HEADS: tl.constexpr = HEADS * PER_HEAD
        gates_I = i_I * VALUE_HEADS
        if (slot >= 0) & (length > 0):
            k_K = tl.arange(0, BLOCK_K)
            has_K = k_K < KEYS
            state_ptrs_VK = (
                state_ptr
                + slot * state_stride_S
                + head * state_stride_H
                + (value_head % PER_HEAD) * state_stride_R
                + k_K[None, :] * state_stride_K
                + v_V[:, None] * state_stride_V
            )
            has_VK = has_V[:, None] & has_K[None, :]
            state_VK = tl.load(state_ptrs_VK, mask=has_VK & (context > 0), other=0.0)
            # Only where channels have decays of their own do value heads have keys of their own.
            KEY_ROWS: tl.constexpr = (VALUE_HEADS if BY_CHANNEL else HEADS) * KEYS
            key_head = value_head if BY_CHANNEL else head
            places_IK = (i_I * KEY_ROWS)[:, None] + k_K[None, :]
            places_IJ = (gates_I * CHUNK)[:, None] + i_I[None, :]
            own_v_ptr = v_ptr + head * v_stride_H + (value_head % PER_HEAD) * v_stride_R
            before = context % CHUNK  # tokens of the first sub-chunk that are in the state
            for index in tl.range(0, bound((before + length + CHUNK - 1) // CHUNK, INTERPRETED), num_stages=STAGES):
                done = tl.maximum(index * CHUNK - before, 0)
                stop = tl.minimum((index + 1) * CHUNK - before, length)
                has_I = i_I < stop - done
                token = (start + done).to(tl.int64)
                gate = token * VALUE_HEADS + value_head
                key_place = token * KEY_ROWS + key_head * KEYS
                has_IK = has_I[:, None] & has_K[None, :]
                has_VI = has_V[:, None] & has_I[None, :]
                keys_IK = tl.load(keys_ptr + key_place + places_IK, mask=has_IK, other=0.0)
                queries_IK = tl.load(queries_ptr + key_place + places_IK, mask=has_IK, other=0.0)
                inverse_IJ = tl.load(inverses_ptr + gate * CHUNK + places_IJ, mask=has_I[:, None], other=0.0)
                products_IJ = tl.load(products_ptr + gate * CHUNK + places_IJ, mask=has_I[:, None], other=0.0)
                v_ptrs_VI = own_v_ptr + token * v_stride_T + (i_I * v_stride_T)[None, :] + v_V[:, None]
                v_VI = tl.load(v_ptrs_VI, mask=has_VI, other=0.0).to(tl.float32)
                beta_I = tl.load(beta_ptr + gate + gates_I, mask=has_I, other=0.0)
                snapshot = snapshot_slot(snapshot_slots_ptr, snapshot_lens_ptr, prompt, stop, SNAPSHOTS).to(tl.int64)
                last_gate = gate + (stop - done - 1) * VALUE_HEADS
                if BY_CHANNEL:
                    left_IK = tl.load(left_ptr + key_place + places_IK, mask=has_IK, other=0.0)
                    last_K = tl.load(totals_ptr + last_gate * KEYS + k_K, mask=has_K, other=0.0)
                else:
                    left_IK = keys_IK
                    kept_I = tl.load(totals_ptr + gate + gates_I, mask=has_I, other=0.0)
                    rest_I = tl.load(rest_ptr + gate + gates_I, mask=has_I, other=0.0)
                    kept = tl.load(totals_ptr + last_gate)
                up_V, down_V = _powers(state_VK, v_VI, dtype)
                scaled_VK = (state_VK * up_V[:, None]).to(dtype)
                answer_VI = tl.dot(scaled_VK, tl.trans(keys_IK), input_precision=PRECISION)
                out_VI = tl.dot(scaled_VK, tl.trans(queries_IK), input_precision=PRECISION)
                if BY_CHANNEL:
                    state_VK *= tl.exp2(last_K)[None, :] * up_V[:, None]
                else:
                    answer_VI *= kept_I[None, :]
                    out_VI *= kept_I[None, :]
                    state_VK *= (kept * up_V)[:, None]
                wanted_VI = (v_VI * up_V[:, None] - answer_VI) * beta_I[None, :]
                written_VI = tl.dot(wanted_VI.to(dtype), tl.trans(inverse_IJ), input_precision=PRECISION)
                left_VI = written_VI if BY_CHANNEL else written_VI * rest_I[None, :]
                state_VK = tl.dot(left_VI.to(dtype), left_IK, state_VK, input_precision=PRECISION) * down_V[:, None]
                out_VI = tl.dot(written_VI.to(dtype), tl.trans(products_IJ), out_VI, input_precision=PRECISION)
                out_VI = round_to(out_VI * (down_V * scale)[:, None], out_ptr.dtype.element_ty, INTERPRETED)
                out_ptrs_VI = out_ptr + gate * VALUES + (gates_I * VALUES)[None, :] + v_V[:, None]
                tl.store(out_ptrs_VI, out_VI, mask=has_VI)
                if snapshot >= 0:
                    tl.store(state_ptrs_VK + (snapshot - slot) * state_stride_S, state_VK, mask=has_VK)
            tl.store(state_ptrs_VK, state_VK, mask=has_VK)
        else:
            for index in range(bound((length + CHUNK - 1) // CHUNK, INTERPRETED)):
                gate = (start + index * CHUNK).to(tl.int64) * VALUE_HEADS + value_head
                has_VI = has_V[:, None] & (index * CHUNK + i_I < length)[None, :]
                none_VI = tl.zeros([TILE_V, CHUNK], out_ptr.dtype.element_ty)
                tl.store(out_ptr + gate * VALUES + (gates_I * VALUES)[None, :] + v_V[:, None], none_VI, mask=has_VI)


@triton.jit
def _powers(state_VK, v_VI, dtype: tl.constexpr):
    """Returns powers of two that bring each value's numbers below 16, and their inverses; 1 for float32.

    The numbers of a product with unit keys and an inverse whose entries are at most 1 then fit into float16, which has
    as many digits as tf32 and half the size: below 16 * sqrt(128) + 16 before the inverse, 64 times that after it.
    """
    if dtype == tl.float16:
        largest_V = tl.maximum(tl.max(tl.abs(state_VK), axis=1), tl.max(tl.abs(v_VI), axis=1))
        exponent_V = tl.minimum(tl.maximum(largest_V.to(tl.int32, bitcast=True) >> 23, 4), 250)
        up_V = ((257 - exponent_V) << 23).to(tl.float32, bitcast=True)
        down_V = ((exponent_V - 3) << 23).to(tl.float32, bitcast=True)
    else:
        up_V = tl.full([state_VK.shape[0]], 1.0, tl.float32)
        down_V = up_V
    return up_V, down_V
