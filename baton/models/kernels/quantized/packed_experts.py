"""A layer's experts on a GPU with weights of packed integers or mxfp4: per layer one product over the rows of all
experts, which reads the order of `expert_order`; the activation is a separate launch. The host never waits.

A weight is (number - zero) * scale, or an mxfp4 number times a power of two; both are rounded to the activations'
dtype, as their twins in torch round them. Legend: as in `grouped_gemm`; B byte of packed numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.models.config.quantization.mxfp4_config import MXFP4_BLOCK
from baton.models.formats.packed import RUN, PackedWeight
from baton.models.kernels.moe.expert_order import ExpertOrder, order_by_expert
from baton.models.kernels.moe.expert_sum import sum_choices
from baton.models.kernels.moe.expert_tiles import assignments, places, store, tile_and_block
from baton.models.kernels.quantized.packed_tiles import HOPPER_STEP_MIN, HopperTile
from baton.tritonlib.hopper_check import HopperKernels, has_hopper_kernels, probe_of
from baton.tritonlib.launch import await_predecessors, interpreted, overlap, start_dependents
from baton.tritonlib.rounding import round_to

_ROWS, _DEPTH = 64, 128
# On Hopper, by the mean number of tokens of an expert, chosen on an H200 in the shapes of gpt-oss-120b.
_TILES = {
    8: HopperTile(8, rows=64, at_once=4, stages=2),
    16: HopperTile(16, rows=64, at_once=2, stages=4),
}
_LARGEST_TILE = HopperTile(32, rows=128, at_once=1, stages=2)
_RUN = tl.constexpr(RUN)
_MXFP4 = tl.constexpr(MXFP4_BLOCK)
# Twice the values of mxfp4 by their bits, a number of 4 bits each: 0, 1, 2, 3, 4, 6, 8, 12.
_DOUBLED = tl.constexpr(0xC8643210 - (1 << 32))


@dataclass(frozen=True, eq=False)
class Mxfp4Weight:
    """One of the two layers of all experts.

    Attributes:
        stored_ENB: uint8, in the form of `PackedWeight` or in tiles (`baton.models.formats.mxfp4_tiles`); a number's
            bits are sign, two of exponent, one of mantissa.
        scales_ENG: uint8 exponents of two with a bias of 127, one per 32 inputs.
    """

    stored_ENB: Tensor
    scales_ENG: Tensor

    @property
    def columns(self) -> int:
        return 2 * self.stored_ENB.shape[2]


def run_packed_experts(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    gate_up: PackedWeight | Mxfp4Weight,
    down: PackedWeight | Mxfp4Weight,
    *,
    activate: Callable[[Tensor], Tensor],
    gate_up_bias_EN: Tensor | None = None,
    down_bias_EN: Tensor | None = None,
    batch_invariant: bool = False,
    plus_TD: Tensor | None = None,
    of: int | None = None,
) -> Tensor:
    """Returns the weighted sum of each token's experts, plus `plus_TD`.

    Args:
        x_TD: channels contiguous.
        weights_TK: float32.
        activate: takes gate and up in the order of the first layer's outputs.
        batch_invariant: one shape of tiles for every number of tokens.
        of: as in `run_gated_experts`.
    """
    num_tokens, choices = experts_TK.shape
    if not num_tokens:
        return torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    num_experts = len(_stored(down))
    partial = of is not None
    mean = triton.cdiv(4 * num_tokens * choices, 3 * (num_experts if of is None else of))
    tokens = 64 if batch_invariant else next((size for size in (16, 32) if mean <= size), 64)
    step, down_step = hopper_step(gate_up, x_TD), hopper_step(down, x_TD)
    if step is not None and down_step is not None:
        tokens = 32 if batch_invariant else _tile_of(mean).tokens
    order = order_by_expert(experts_TK, num_experts=num_experts, tile_tokens=tokens, partial=partial)
    common = {"tokens": tokens, "num_tokens": num_tokens, "choices": choices}
    both_RI = multiply_experts(x_TD, gate_up, gate_up_bias_EN, order, None, is_first=True, step=step, **common)
    gated_RI = activate(both_RI)
    parts_RD = multiply_experts(
        gated_RI, down, down_bias_EN, order, weights_TK, is_first=False, step=down_step, **common
    )
    return sum_experts(parts_RD, experts_TK, like=x_TD, partial=partial, plus_TD=plus_TD)


def sum_experts(
    parts_RD: Tensor, experts_TK: Tensor, *, like: Tensor, partial: bool, plus_TD: Tensor | None = None
) -> Tensor:
    """Returns the sum of each token's rows, which the second layer has weighted, plus `plus_TD`.

    Args:
        like: [T,D] of the result's dtype.
        partial: as in `sort_assignments`.
    """
    num_tokens, choices = experts_TK.shape
    out_TD = torch.empty_like(like, memory_format=torch.contiguous_format)
    channels = out_TD.shape[1]
    block = min(triton.next_power_of_2(channels), 1024)
    sum_choices[(num_tokens, triton.cdiv(channels, block))](
        parts_RD,
        plus_TD,
        experts_TK if partial else None,
        out_TD,
        num_tokens,
        0 if plus_TD is None else plus_TD.stride(0),
        CHOICES=choices,
        SHARED=0,
        CHANNELS=channels,
        BLOCK=block,
        **overlap(out_TD.device, rows=num_tokens),
        num_warps=4,
    )
    return out_TD


def _tile_of(mean: int) -> HopperTile:
    return next((tile for tokens, tile in _TILES.items() if mean <= tokens), _LARGEST_TILE)


def hopper_step(weight: PackedWeight | Mxfp4Weight, x_RC: Tensor) -> int | None:
    """Returns the inputs of one step of the Hopper kernel; None if it cannot read the weight or the GPU is another."""
    if isinstance(weight, Mxfp4Weight) or x_RC.dtype != torch.bfloat16:
        return None
    if not has_hopper_kernels(x_RC.device, _HOPPER):
        return None
    step = min(_DEPTH, weight.columns & -weight.columns)
    if weight.bits != 4 or weight.groups_K is not None or weight.order_K is not None:
        return None
    if weight.group_size < weight.columns:
        step = min(step, weight.group_size & -weight.group_size)
    return step if step >= HOPPER_STEP_MIN else None


def _stored(weight: PackedWeight | Mxfp4Weight) -> Tensor:
    return weight.stored_ENB if isinstance(weight, Mxfp4Weight) else weight.stored_NB


_HOPPER = HopperKernels(
    "experts with weights of 4 bits",
    probe_of("baton.models.kernels.quantized.packed_probe", "compare_experts_on_hopper"),
)


def multiply_experts(
    x_RC: Tensor,
    weight: PackedWeight | Mxfp4Weight,
    bias_EN: Tensor | None,
    order: ExpertOrder,
    row_weights: Tensor | None,
    *,
    is_first: bool,
    tokens: int,
    num_tokens: int,
    choices: int,
    step: int | None,
) -> Tensor:
    """Multiplies one of the two layers: the first maps tokens' rows to rows in the order of experts, the second maps
    those back to the order of tokens.

    Args:
        tokens: of a tile of the order.
        step: `hopper_step`.
    """
    stored, columns = _stored(weight), weight.columns
    rows = stored.shape[1]
    out = x_RC.new_empty(num_tokens * choices, rows)
    if step is not None:
        # NOTE: imported here because Gluon is experimental: with another Triton the import may fail.
        from baton.models.kernels.quantized.packed_hopper import WARPS, multiply_packed_experts

        assert isinstance(weight, PackedWeight)
        tile = _tile_of(tokens)
        multiply_packed_experts[(order.num_tiles * triton.cdiv(rows, tile.rows),)](
            x_RC,
            stored,
            weight.scales_GN,
            weight.zeros_GN,
            bias_EN,
            row_weights,
            order.order_P,
            order.tiles_3L,
            out,
            order.num_tiles,
            x_RC.stride(0),
            CHOICES=choices,
            IS_FIRST=is_first,
            OUT=rows,
            COLUMNS=columns,
            GROUP=weight.group_size,
            ROWS=tile.rows,
            TOKENS=tokens,
            STEP=step,
            AT_ONCE=tile.at_once,
            STAGES=tile.stages,
            **overlap(x_RC.device, rows=num_tokens),
            num_warps=WARPS,
        )
        return out
    _product_kernel[(order.num_tiles * triton.cdiv(rows, _ROWS),)](
        x_RC,
        stored,
        weight.scales_ENG if isinstance(weight, Mxfp4Weight) else weight.scales_GN,
        None if isinstance(weight, Mxfp4Weight) else weight.zeros_GN,
        bias_EN,
        row_weights,
        order.order_P,
        order.tiles_3L,
        out,
        order.num_tiles,
        x_RC.stride(0),
        CHOICES=choices,
        IS_FIRST=is_first,
        OUT=rows,
        IN=columns,
        GROUP=MXFP4_BLOCK if isinstance(weight, Mxfp4Weight) else weight.group_size,
        BITS=4 if isinstance(weight, Mxfp4Weight) else weight.bits,
        MXFP4=isinstance(weight, Mxfp4Weight),
        BLOCK_M=tokens,
        BLOCK_N=_ROWS,
        DEPTH=_DEPTH,
        INTERPRETED=interpreted(),
        **overlap(x_RC.device, rows=num_tokens),
        num_warps=4,
        num_stages=4,
    )
    return out


@triton.jit(do_not_specialize=["num_tiles"])
def _product_kernel(
    x,
    stored,
    scales,
    zeros,
    bias,
    row_weights,
    order,
    tiles,
    out,
    num_tiles,
    x_stride,
    CHOICES: tl.constexpr,
    IS_FIRST: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    MXFP4: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """A tile of an expert's rows. The first layer finds its rows of x through the order and writes them in places of
    the order; the second reads those and writes each assignment to its own row."""
    start_dependents(OVERLAP)
    dtype: tl.constexpr = x.dtype.element_ty
    kind: tl.constexpr = tl.float32 if INTERPRETED else dtype
    BLOCKS: tl.constexpr = (OUT + BLOCK_N - 1) // BLOCK_N
    BYTES: tl.constexpr = DEPTH * BITS // 8
    ROW_BYTES: tl.constexpr = (IN + 2 * _RUN - 1) // (2 * _RUN) * (2 * _RUN * BITS // 8)
    await_predecessors(OVERLAP)
    tile, block = tile_and_block(tl.program_id(0), num_tiles, BLOCKS)
    expert, places_M, exists_M = places(tiles, tile, num_tiles, order is None, BLOCK_M)
    if expert < 0:
        return
    assignments_M = assignments(order, places_M, exists_M)
    rows_M = assignments_M // CHOICES if IS_FIRST else places_M
    channels_N = block * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows past the end read the last row and are never written.
    read_N = expert.to(tl.int64) * OUT + tl.minimum(channels_N, OUT - 1)
    bytes_B = tl.arange(0, BYTES)
    inputs_B = bytes_B // _RUN * (2 * _RUN) + bytes_B % _RUN if BITS == 4 else bytes_B
    x_MB = x + rows_M.to(tl.int64)[:, None] * x_stride + inputs_B[None, :]
    stored_NB = stored + read_N[:, None] * ROW_BYTES + bytes_B[None, :]
    sum_NM = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if MXFP4:
        COLUMNS: tl.constexpr = IN // _MXFP4
    else:
        GROUPS: tl.constexpr = (IN + GROUP - 1) // GROUP
    for start in range(0, IN, DEPTH):
        first_byte = start * BITS // 8
        numbers_NB = tl.load(stored_NB + first_byte, mask=(first_byte + bytes_B < ROW_BYTES)[None, :], other=0)
        if MXFP4:
            groups_G = start // _MXFP4 + tl.arange(0, DEPTH // _MXFP4)
            powers_NG = tl.load(
                scales + read_N[:, None] * COLUMNS + groups_G[None, :], mask=(groups_G < COLUMNS)[None, :], other=127
            )
            powers_NB = tl.reshape(
                tl.broadcast_to(powers_NG[:, :, None], [BLOCK_N, DEPTH // _MXFP4, _RUN]), [BLOCK_N, BYTES]
            )
        for half in tl.static_range(2 if BITS == 4 else 1):
            columns_B = start + half * _RUN + inputs_B
            in_B = columns_B < IN
            x_part_MB = tl.load(x_MB + start + half * _RUN, mask=exists_M[:, None] & in_B[None, :], other=0.0)
            part_NB = (numbers_NB >> (4 * half)) & 15 if BITS == 4 else numbers_NB
            if MXFP4:
                weight_NB = _from_mxfp4(part_NB, powers_NB)
            else:
                places_NB = expert.to(tl.int64) * (GROUPS * OUT) + tl.minimum(channels_N, OUT - 1)[:, None]
                if GROUP % DEPTH == 0 or GROUP >= IN:  # one for all of a step's inputs
                    places_NB += start // GROUP * OUT
                else:
                    places_NB += (tl.minimum(columns_B, IN - 1) // GROUP * OUT)[None, :]
                weight_NB = part_NB.to(tl.float32)
                if zeros is not None:
                    weight_NB -= tl.load(zeros + places_NB).to(tl.float32)
                else:
                    weight_NB -= 1 << (BITS - 1)
                weight_NB *= tl.load(scales + places_NB).to(tl.float32)
            weight_NB = round_to(weight_NB, dtype, INTERPRETED).to(kind)
            sum_NM = tl.dot(weight_NB, x_part_MB.to(kind).T, sum_NM, input_precision="ieee")
    if bias is not None:
        sum_NM += tl.load(bias + read_N).to(tl.float32)[:, None]
    if row_weights is not None:
        sum_NM *= tl.load(row_weights + assignments_M, mask=exists_M, other=0.0)[None, :]
    sum_NM = round_to(sum_NM, dtype, INTERPRETED)
    store(out, sum_NM, places_M if IS_FIRST else assignments_M, channels_N, exists_M, OUT)


@triton.jit
def _from_mxfp4(numbers_NB, powers_NB):
    """Returns 4-bit floats (0, 0.5, 1, 1.5, 2, 3, 4, 6 with a sign) times powers of two, in float32."""
    places_NB = (numbers_NB & 7).to(tl.int32) * 4
    doubled_NB = ((tl.full(places_NB.shape, _DOUBLED, tl.int32) >> places_NB) & 15).to(tl.float32)
    signed_NB = tl.where(numbers_NB >= 8, -doubled_NB, doubled_NB)
    # The exponent's bits; a scale of 2 ** -127 rounds to 0 like the smallest of the numbers that dtypes have.
    halved_NB = tl.maximum(powers_NB.to(tl.int32) - 1, 0) << 23
    return signed_NB * halved_NB.to(tl.float32, bitcast=True)
