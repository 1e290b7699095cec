"""The products of a prompt's rows with the weights of their experts on Hopper: launches `grouped_hopper`, and for
weights in fp8 `grouped_hopper_fp8`. Rows are then rounded to fp8 as well, each 128 channels with a scale of their own,
as checkpoints with such weights expect.

Legend: T token, K choice of a token, S = T*K assignment, D hidden channel, I intermediate channel, E expert, N output
channel, C input channel.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from torch import Tensor

from baton.models.config.quantization.config import FP8_BLOCK
from baton.models.formats import fp8
from baton.models.kernels.moe.expert_order import ExpertOrder, sort_assignments
from baton.models.kernels.moe.expert_weights import ExpertWeights
from baton.models.kernels.quantized.fp8_quantize import quantize_blocks
from baton.tritonlib.hopper_check import HopperKernels, has_hopper_kernels, probe_of

if TYPE_CHECKING:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_KERNELS = HopperKernels("experts of prompts", probe_of("baton.models.kernels.moe.prompts_probe"))
_ROWS = 64  # of a warpgroup
_STEP_BYTES = 128
_ALIGNMENT = 16


class PromptTile(NamedTuple):
    """The part of a product that a program computes at a time.

    Attributes:
        groups: warpgroups that multiply.
        stages: steps of the gated product, and of the other one, that are in shared memory or in flight.
        together: tiles that run at about the same time with the same weights.
        registers: of a thread that multiplies, and of one that copies.
        launched: registers of each thread when a program starts, which its warps then redistribute.
    """

    groups: int
    stages: tuple[int, int]
    together: int
    registers: tuple[int, int]
    launched: int


TWO_GROUPS = PromptTile(2, (4, 4), 2, (216, 72), 168)
THREE_GROUPS = PromptTile(3, (4, 3), 1, (160, 32), 128)
FP8 = PromptTile(2, (4, 4), 1, (216, 72), 168)
# Mean tokens of an expert, as measured: fewer are multiplied by `grouped_gemm`; those between the other two by three
# groups, but not rows of more channels in 16 bits, for which `grouped_gemm` is faster.
_LEAST_TOKENS = 20
_THREE_FROM, _THREE_TO = 104, 640
_THREE_CHANNELS = 4096


def choose_tile(num_assignments: int, num_experts: int, channels: int, *, is_fp8: bool) -> PromptTile | None:
    """The tile for products of so many rows; None where `grouped_gemm` is faster."""
    if num_assignments < _LEAST_TOKENS * num_experts:
        return None
    if is_fp8:
        return FP8
    if not _THREE_FROM * num_experts < num_assignments < _THREE_TO * num_experts:
        return TWO_GROUPS
    return THREE_GROUPS if channels <= _THREE_CHANNELS else None


def run(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    *,
    of: int | None = None,
) -> Tensor | None:
    """Returns [S, D], each assignment's output times its weight, or None where other kernels compute it. The activation
    is silu; the arguments are as in `grouped_gemm.run_gated_experts`."""
    num_experts = len(down.weights_ENC) if of is None else of
    tile = choose_tile(experts_TK.numel(), num_experts, x_TD.shape[1], is_fp8=gate_up.scales is not None)
    if tile is None or not _are_taken(x_TD, gate_up, down) or not has_hopper_kernels(x_TD.device, _KERNELS):
        return None
    return multiply(x_TD, weights_TK, experts_TK, gate_up, down, tile, partial=of is not None)


def _are_taken(x_TD: Tensor, gate_up: ExpertWeights, down: ExpertWeights) -> bool:
    """Whether the kernels support the sizes and dtypes, and rows begin at multiples of 16 bytes."""
    half = x_TD.dtype == torch.bfloat16 or (x_TD.dtype == torch.float16 and gate_up.scales is None)
    short = x_TD.shape[0] * x_TD.stride(0) < 2**31
    aligned = x_TD.data_ptr() % _ALIGNMENT == 0 and x_TD.stride(0) * x_TD.element_size() % _ALIGNMENT == 0
    return half and short and aligned and _can_be_copied(gate_up, x_TD.dtype) and _can_be_copied(down, x_TD.dtype)


def _can_be_copied(layer: ExpertWeights, dtype: torch.dtype) -> bool:
    """Whether the copy engine can read all experts' weights as one matrix, in whole steps."""
    weights_ENC, scales = layer.weights_ENC, layer.scales
    if scales is not None:
        dtype = fp8.E4M3
        if any(FP8_BLOCK * scales.shape[axis] != weights_ENC.shape[axis] for axis in (1, 2)):
            return False
    return (
        layer.bias_EN is None
        and weights_ENC.dtype == dtype
        and weights_ENC.is_contiguous()
        and weights_ENC.data_ptr() % _ALIGNMENT == 0
        and weights_ENC.shape[2] * weights_ENC.element_size() % _STEP_BYTES == 0
    )


def multiply(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    tile: PromptTile,
    *,
    partial: bool = False,
) -> Tensor:
    """Returns the result of `run`, where the sizes are supported.

    Args:
        partial: experts below 0 are other ranks'; their outputs are undefined.
    """
    num_experts, channels, intermediate = down.weights_ENC.shape
    rows, choices = experts_TK.numel(), experts_TK.shape[1]
    order = sort_assignments(experts_TK, num_experts=num_experts, tile_tokens=_ROWS * tile.groups, partial=partial)
    parts_SD = x_TD.new_empty(rows, channels)
    if gate_up.scales is None:
        gated_SI = x_TD.new_empty(rows, intermediate)
        launch(x_TD, gate_up, order, None, gated_SI, tile, choices=choices)
        launch(gated_SI, down, order, weights_TK, parts_SD, tile, choices=1)
        return parts_SD
    stored_TD, scales_TB = quantize_blocks(x_TD, power_of_two=gate_up.power_of_two_inputs)
    # A row's scales are next to each other, because a program reads some rows' scales of all steps.
    scales_TB = scales_TB.contiguous()
    gated_SI = x_TD.new_empty(rows, intermediate, dtype=fp8.E4M3)
    gated_SB = x_TD.new_empty(rows, intermediate // FP8_BLOCK, dtype=torch.float32)
    launch(stored_TD, gate_up, order, None, gated_SI, tile, choices=choices, x_scales=scales_TB, out_scales=gated_SB)
    launch(gated_SI, down, order, weights_TK, parts_SD, tile, choices=1, x_scales=gated_SB)
    return parts_SD


def launch(
    x: Tensor,
    layer: ExpertWeights,
    order: ExpertOrder,
    row_weights: Tensor | None,
    out: Tensor,
    tile: PromptTile,
    *,
    choices: int,
    x_scales: Tensor | None = None,
    out_scales: Tensor | None = None,
) -> None:
    """Launches the gated product, of gathered rows of x, `choices` for each, or with `row_weights` the other one.

    Args:
        x_scales: of rows in fp8, with `out_scales` for gated results.
    """
    # NOTE: imported here because Gluon is experimental: with another Triton the import may fail.
    from baton.models.kernels.moe.grouped_hopper import multiply_grouped
    from baton.models.kernels.moe.grouped_hopper_fp8 import multiply_grouped_fp8
    from baton.models.kernels.moe.grouped_hopper_steps import BOX, ROWS, WARPS

    gated = row_weights is None
    grid = (_num_programs(out, order, BOX if gated else 2 * BOX),)
    arguments = {
        "x_map": None if gated else _in_boxes(x, ROWS),
        "x": x,
        "weights": _in_boxes(layer.weights_ENC.flatten(0, 1), BOX),
        "order": order.order_P,
        "tiles_ptr": order.tiles_3L,
        "row_weights": row_weights,
        "out": out,
        "x_stride": x.stride(0),
        "num_tiles": order.num_tiles,
        "CHOICES": choices,
        "OUT": out.shape[1],
        "IN": x.shape[1],
        "GATED": gated,
        "STAGES": tile.stages[0 if gated else 1],
        "TOGETHER": tile.together,
        "REGISTERS": tile.registers[0],
        "COPY_REGISTERS": tile.registers[1],
        "num_warps": WARPS,
        "maxnreg": tile.launched,
    }
    if x_scales is None:
        multiply_grouped[grid](**arguments, GROUPS=tile.groups)
    else:
        multiply_grouped_fp8[grid](
            **arguments,
            x_scales=x_scales,
            weight_scales=layer.scales,
            out_scales=out_scales,
            x_scales_stride=x_scales.stride(0),
            POWER_OF_TWO=layer.power_of_two_inputs,
        )


def _num_programs(out: Tensor, order: ExpertOrder, channels: int) -> int:
    """One for each multiprocessor, if there are as many tiles."""
    tiles: int = order.num_tiles * triton.cdiv(out.shape[1], channels)
    return min(tiles, torch.cuda.get_device_properties(out.device).multi_processor_count) if out.is_cuda else tiles


def _in_boxes(matrix: Tensor, rows: int) -> "TensorDescriptor":
    """A descriptor of rows and one step's inputs."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(_STEP_BYTES, 8 * matrix.element_size(), 2)
    return TensorDescriptor.from_tensor(matrix, [rows, _STEP_BYTES // matrix.element_size()], layout)
