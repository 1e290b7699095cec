"""The scan of Mamba-2 over prompts on a GPU, sub-chunk by sub-chunk. The twin is in
`baton.models.layers.recurrent.selective_scan`, which has the formulas.

Channels are rows of a state's products, so a program keeps the state of one head in registers; only loaded numbers pass
through shared memory. Numbers in bfloat16 are multiplied as they are. Legend: as there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.models.kernels.recurrent.prompt_tiles import find_tile, most_tiles
from baton.models.kernels.recurrent.snapshots import snapshot_slot
from baton.models.kernels.recurrent.state_rows import StateRows
from baton.tritonlib.launch import bound, interpreted, shared_bytes
from baton.tritonlib.rounding import round_to

# Tokens of a sub-chunk, at multiples of this of a prompt's positions.
SUB_CHUNK = 64
_TILE_P = 64
_NUM_WARPS = 4
# Sub-chunks in flight at most; others keep them in registers. And shared memory beside them.
_STAGES = {torch.bfloat16: 3}
_SCRATCH_BYTES = 12 << 10
_STEP_HEADS = 32
_LEAST_OF_DOT = 16
_PRECISIONS = {torch.float32: "ieee", torch.bfloat16: "ieee", torch.float16: "tf32x3"}


def prompts(
    x_THP: Tensor,
    dt_TH: Tensor,
    b_TGN: Tensor,
    c_TGN: Tensor,
    log_rate_H: Tensor,
    skip_H: Tensor,
    dt_bias_H: Tensor,
    out_THP: Tensor,
    states_SHPN: Tensor,
    dt_limits: tuple[float, float],
    rows: StateRows,
) -> None:
    """Writes the outputs of the prompts' tokens, zeros after them, and the prompts' states."""
    num_tokens, heads, channels = x_THP.shape
    groups, numbers = b_TGN.shape[1:]
    num_prompts = len(rows.prompt_slots_P)
    tile = max(_LEAST_OF_DOT, min(_TILE_P, triton.next_power_of_2(channels)))
    block_n = max(_LEAST_OF_DOT, triton.next_power_of_2(numbers))
    dt_and_faded = torch.empty((2, num_tokens, heads), dtype=torch.float32, device=x_THP.device)
    where = rows.prompt_slots_P, rows.prompt_starts_P1, rows.prompt_context_P
    _steps[(most_tiles(rows, num_tokens, SUB_CHUNK), triton.cdiv(heads, _STEP_HEADS))](
        dt_TH,
        log_rate_H,
        dt_bias_H,
        *dt_and_faded,
        *where[1:],
        num_prompts,
        *dt_limits,
        dt_TH.stride(0),
        HEADS=heads,
        TILE_H=_STEP_HEADS,
        TILE_I=SUB_CHUNK,
        num_warps=1,
    )
    _prompt[(num_prompts + 1, heads, triton.cdiv(channels, tile))](
        x_THP,
        *dt_and_faded,
        b_TGN,
        c_TGN,
        skip_H,
        out_THP,
        states_SHPN,
        *where,
        rows.snapshot_slots_PM,
        rows.snapshot_lens_PM,
        num_prompts,
        num_tokens,
        *(x_THP.stride(0), b_TGN.stride(0), c_TGN.stride(0)),
        *states_SHPN.stride()[:3],
        HEADS=heads,
        PER_GROUP=heads // groups,
        CHANNELS=channels,
        NUMBERS=numbers,
        INTERPRETED=interpreted(),
        TILE_P=tile,
        BLOCK_N=block_n,
        TILE_I=SUB_CHUNK,
        SNAPSHOTS=rows.snapshot_slots_PM.shape[1],
        PRECISION=_PRECISIONS[x_THP.dtype],
        STAGES=choose_stages(x_THP.dtype, block_n, tile, shared=shared_bytes(x_THP.device)),
        num_warps=_NUM_WARPS,
    )


def choose_stages(dtype: torch.dtype, numbers: int, channels: int, *, shared: int) -> int:
    """How many sub-chunks are in flight: of B and C, and of x twice.

    Args:
        numbers, channels: of a program's tile.
        shared: bytes of shared memory of a program at most.
    """
    each = SUB_CHUNK * 2 * (numbers + channels) * dtype.itemsize
    return max(1, min(_STAGES.get(dtype, 1), (shared - _SCRATCH_BYTES) // each))


@triton.jit
def limited_step(dt, least, most):
    """Softplus of dt, within limits."""
    grown = tl.exp(tl.minimum(dt, 20.0))
    sum = 1.0 + grown
    # A logarithm of the rounded sum loses small numbers; the quotient makes up for the rounding.
    soft = tl.where(sum == 1.0, grown, tl.log(sum) * (grown / tl.maximum(sum - 1.0, 1e-30)))
    soft = tl.where(dt > 20.0, dt, soft)
    return tl.minimum(tl.maximum(soft, least), most)


@triton.jit(do_not_specialize=["num_prompts"])
def _steps(
    dt_ptr,
    log_rate_ptr,
    bias_ptr,
    out_ptr,
    faded_ptr,
    starts_ptr,
    context_ptr,
    num_prompts,
    dt_min,
    dt_max,
    dt_stride,
    HEADS: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_I: tl.constexpr,
):
    """The steps in time of one sub-chunk's tokens, for TILE_H heads, and how much the state has faded since its start,
    as logarithms."""
    prompt, place = find_tile(tl.program_id(0), starts_ptr, context_ptr, num_prompts, TILE=TILE_I, ALIGN=TILE_I)
    if prompt < num_prompts:
        start = tl.load(starts_ptr + prompt)
        length = tl.load(starts_ptr + prompt + 1) - start
        i_I, h_H = tl.arange(0, TILE_I), tl.program_id(1) * TILE_H + tl.arange(0, TILE_H)
        first = place * TILE_I - tl.load(context_ptr + prompt) % TILE_I
        new_I, has_H = first + i_I, h_H < HEADS
        has_IH = ((new_I >= 0) & (new_I < length))[:, None] & has_H[None, :]
        token_I = (start + new_I).to(tl.int64)
        bias_H = tl.load(bias_ptr + h_H, mask=has_H, other=0.0)
        decay_H = -tl.exp(tl.load(log_rate_ptr + h_H, mask=has_H, other=0.0))
        dt_IH = tl.load(dt_ptr + token_I[:, None] * dt_stride + h_H[None, :], mask=has_IH, other=0.0).to(tl.float32)
        dt_IH = tl.where(has_IH, limited_step(dt_IH + bias_H[None, :], dt_min, dt_max), 0.0)
        places_IH = token_I[:, None] * HEADS + h_H[None, :]
        tl.store(out_ptr + places_IH, dt_IH, mask=has_IH)
        tl.store(faded_ptr + places_IH, tl.cumsum(dt_IH * decay_H[None, :], axis=0), mask=has_IH)


@triton.jit(do_not_specialize=["num_prompts", "num_tokens"])
def _prompt(
    x_ptr,
    dt_ptr,
    faded_ptr,
    b_ptr,
    c_ptr,
    skip_ptr,
    out_ptr,
    state_ptr,
    slots_ptr,
    starts_ptr,
    context_ptr,
    snapshot_slots_ptr,
    snapshot_lens_ptr,
    num_prompts,
    num_tokens,
    x_stride,
    b_stride,
    c_stride,
    state_stride_S,
    state_stride_H,
    state_stride_P,
    HEADS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    CHANNELS: tl.constexpr,
    NUMBERS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    TILE_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_I: tl.constexpr,
    STAGES: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """All new tokens of one prompt, for TILE_P channels of one head."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    prompt = tl.program_id(0)
    head = tl.program_id(1)
    is_prompt = prompt < num_prompts
    slot = tl.load(slots_ptr + prompt, mask=is_prompt, other=-1).to(tl.int64)
    start = tl.load(starts_ptr + prompt)
    length = tl.load(starts_ptr + prompt + 1, mask=is_prompt, other=num_tokens) - start
    context = tl.load(context_ptr + prompt, mask=is_prompt, other=0)
    i_I = tl.arange(0, TILE_I)
    p_P = tl.program_id(2) * TILE_P + tl.arange(0, TILE_P)
    has_P = p_P < CHANNELS
    out_places_IP = (i_I * (HEADS * CHANNELS))[:, None] + p_P[None, :]
    if (slot >= 0) & (length > 0):
        n_N = tl.arange(0, BLOCK_N)
        has_N = n_N < NUMBERS
        has_PN = has_P[:, None] & has_N[None, :]
        group = head // PER_GROUP
        skip = tl.load(skip_ptr + head)
        state_ptrs_PN = state_ptr + slot * state_stride_S + head * state_stride_H
        state_ptrs_PN += p_P[:, None] * state_stride_P + n_N[None, :]
        state_PN = tl.load(state_ptrs_PN, mask=has_PN & (context > 0), other=0.0)
        before = context % TILE_I  # tokens of the first sub-chunk that are in the state
        for index in tl.range(0, bound((before + length + TILE_I - 1) // TILE_I, INTERPRETED), num_stages=STAGES):
            new_I = index * TILE_I - before + i_I  # counts from the first new token
            has_I = (new_I >= 0) & (new_I < length)
            first = (start + index * TILE_I - before).to(tl.int64)
            has_IN, has_PI = has_I[:, None] & has_N[None, :], has_P[:, None] & has_I[None, :]
            gates_I = first * HEADS + head + i_I * HEADS
            # Tokens that are not of this step neither fade nor add anything.
            dt_I = tl.load(dt_ptr + gates_I, mask=has_I, other=0.0)
            faded_I = tl.load(faded_ptr + gates_I, mask=has_I, other=0.0)
            faded = tl.load(
                faded_ptr + (first + tl.minimum(TILE_I, length + before - index * TILE_I) - 1) * HEADS + head
            )
            b_ptrs_IN = b_ptr + first * b_stride + group * NUMBERS + (i_I * b_stride)[:, None] + n_N[None, :]
            b_IN = tl.load(b_ptrs_IN, mask=has_IN, other=0.0)
            c_ptrs_IN = c_ptr + first * c_stride + group * NUMBERS + (i_I * c_stride)[:, None] + n_N[None, :]
            c_IN = tl.load(c_ptrs_IN, mask=has_IN, other=0.0)
            # Loaded twice, because each of two places in shared memory has its own order.
            x_ptrs_I, p_ptrs_P = x_ptr + first * x_stride + i_I * x_stride, head * CHANNELS + p_P
            x_IP = tl.load(x_ptrs_I[:, None] + p_ptrs_P[None, :], mask=has_I[:, None] & has_P[None, :], other=0.0)
            x_PI = tl.load(x_ptrs_I[None, :] + p_ptrs_P[:, None], mask=has_PI, other=0.0).to(tl.float32)
            done = (index + 1) * TILE_I - before
            snapshot = snapshot_slot(snapshot_slots_ptr, snapshot_lens_ptr, prompt, done, SNAPSHOTS).to(tl.int64)
            y_PI = _times(state_PN, tl.trans(c_IN), PRECISION, INTERPRETED) * tl.exp(faded_I)[None, :] + skip * x_PI
            if INTERPRETED:
                products_II = tl.dot(c_IN.to(tl.float32), tl.trans(b_IN.to(tl.float32)))
            else:
                products_II = tl.dot(c_IN, tl.trans(b_IN), input_precision=PRECISION)
            fade_II = tl.where(i_I[:, None] >= i_I[None, :], faded_I[:, None] - faded_I[None, :], float("-inf"))
            products_II *= tl.exp(fade_II) * dt_I[None, :]
            y_IP = _times(products_II, x_IP, PRECISION, INTERPRETED) + tl.trans(y_PI)
            out_ptrs_IP = out_ptr + (first * HEADS + head) * CHANNELS + out_places_IP
            tl.store(out_ptrs_IP, round_to(y_IP, dtype, INTERPRETED), mask=has_I[:, None] & has_P[None, :])
            left_PI = x_PI * (dt_I * tl.exp(faded - faded_I))[None, :]
            state_PN = state_PN * tl.exp(faded) + _times(left_PI, b_IN, PRECISION, INTERPRETED)
            if snapshot >= 0:
                tl.store(state_ptrs_PN + (snapshot - slot) * state_stride_S, state_PN, mask=has_PN)
        tl.store(state_ptrs_PN, state_PN, mask=has_PN)
    else:
        for index in range(bound((length + TILE_I - 1) // TILE_I, INTERPRETED)):
            first = (start + index * TILE_I).to(tl.int64)
            has_IP = (index * TILE_I + i_I < length)[:, None] & has_P[None, :]
            none_IP = tl.zeros([TILE_I, TILE_P], dtype)
            tl.store(out_ptr + (first * HEADS + head) * CHANNELS + out_places_IP, none_IP, mask=has_IP)


@triton.jit
def _times(x, given, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """The product of float32 numbers with a model's own numbers. Those in bfloat16 stay as they are, and x is the sum
    of two numbers in bfloat16, which have 16 of its digits."""
    if given.dtype == tl.bfloat16 and not INTERPRETED:
        high = x.to(tl.bfloat16)
        low = (x - high.to(tl.float32)).to(tl.bfloat16)
        product = tl.dot(high, given, tl.dot(low, given))
    else:
        product = tl.dot(x, given.to(tl.float32), input_precision=PRECISION)
    return product
