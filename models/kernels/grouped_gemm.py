"""A layer's experts on a GPU: three launches behind the order, and nothing that the host waits for.

The rows of x are found inside of the first product, which also applies the activation; the second one applies the
routing weights and writes each assignment to a place of its own; the third launch adds up a token's experts in the
order of its choices. Tiles follow from the shapes that the host knows.

Legend: T token, D hidden channel, E expert, K chosen expert of a token, S = T*K assignment, I intermediate channel,
N output channel, C input channel.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attention.kernels.launch import interpreted
from models.kernels.expert_order import ExpertOrder, order_by_expert
from models.kernels.grouped_gemm_kernel import grouped_down, grouped_gate_up, sum_choices
from models.kernels.grouped_gemm_tiles import Tiles, tiles_for

# From tiles of so many tokens on the copy engine (TMA) reads the rows of the second product, which lie in order.
_ROWS_BY_MAP = 128


@dataclass(frozen=True)
class ExpertWeights:
    """One of the two layers of all experts.

    Attributes:
        weights_ENC: either of the last axes may be the contiguous one.
        bias_EN: of the model's type, contiguous.
        scales: float32 [E, rows, columns], contiguous, where the weights are fp8: a number is weight * scale. Rows and
            columns cover equal parts of N (for gate and up, of each half) and C: all of it, or 128.
    """

    weights_ENC: Tensor
    bias_EN: Tensor | None = None
    scales: Tensor | None = None

    @property
    def inputs_first(self) -> bool:
        """Whether weights lie in memory as [E, C, N]."""
        return self.weights_ENC.stride(2) != 1


@dataclass(frozen=True)
class Activation:
    """silu(gate) * up; with a limit, both clamped: gate * sigmoid(alpha * gate) * (up + 1).

    Attributes:
        interleaved: gates at even channels and ups at odd ones, else all gates before all ups.
    """

    interleaved: bool = False
    limit: float | None = None
    alpha: float = 1.0


SILU = Activation()


def run_gated_experts(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    *,
    activation: Activation = SILU,
    weights_on_input: bool = False,
    batch_invariant: bool = False,
    plus_TD: Tensor | None = None,
) -> Tensor:
    """Each token through its experts, summed by weight, plus `plus_TD`.

    Args:
        x_TD: channels contiguous.
        weights_TK: float32.
        experts_TK: of any integer type; contiguous, as the weights are. A token's experts differ.
        weights_on_input: the weights multiply what the experts get, not what they give.
        batch_invariant: one shape of tiles for every number of tokens.
    """
    num_tokens, choices = experts_TK.shape
    out_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    if not num_tokens:
        return out_TD
    num_experts, channels, intermediate = down.weights_ENC.shape
    tiles = tiles_for(
        num_assignments=num_tokens * choices,
        num_experts=num_experts,
        dtype=x_TD.dtype,
        fp8=gate_up.scales is not None,
        batch_invariant=batch_invariant,
    )
    order = order_by_expert(experts_TK, num_experts=num_experts, tile_tokens=tiles.gate_up.tokens)
    gated_SI = x_TD.new_empty(num_tokens * choices, intermediate)
    _launch_gate_up(x_TD, gate_up, order, gated_SI, weights_TK if weights_on_input else None, activation, tiles.gate_up)
    parts_SD = x_TD.new_empty(num_tokens * choices, channels)
    _launch_down(gated_SI, down, order, parts_SD, None if weights_on_input else weights_TK, tiles.down)
    block = min(triton.next_power_of_2(channels), 1024)
    sum_choices[(num_tokens, triton.cdiv(channels, block))](
        parts_SD,
        plus_TD,
        out_TD,
        channels,
        0 if plus_TD is None else plus_TD.stride(0),
        CHOICES=choices,
        BLOCK=block,
        num_warps=4,
    )
    return out_TD


def _launch_gate_up(
    x_TD: Tensor,
    layer: ExpertWeights,
    order: ExpertOrder,
    gated_SI: Tensor,
    row_weights: Tensor | None,
    activation: Activation,
    tiles: Tiles,
) -> None:
    num_assignments, intermediate = gated_SI.shape
    columns = 2 * tiles.channels if activation.interleaved else tiles.channels
    grouped_gate_up[(order.num_tiles * triton.cdiv(intermediate, tiles.channels),)](
        x_TD,
        layer.weights_ENC,
        _copy_map(layer, columns, tiles.inputs),
        layer.bias_EN,
        layer.scales,
        row_weights,
        order.order_P,
        order.tiles_3L,
        gated_SI,
        order.num_tiles,
        x_TD.stride(0),
        *layer.weights_ENC.stride(),
        activation.limit or 0.0,
        activation.alpha,
        CHOICES=num_assignments // len(x_TD),
        OUT=intermediate,
        IN=x_TD.shape[1],
        INTERLEAVED=activation.interleaved,
        CLAMPED=activation.limit is not None,
        SCALE_N=_part(layer.scales, 1, intermediate, halves=2),
        SCALE_K=_part(layer.scales, 2, x_TD.shape[1]),
        INPUTS_FIRST=layer.inputs_first,
        BLOCK_M=tiles.tokens,
        BLOCK_N=tiles.channels,
        BLOCK_K=tiles.inputs,
        INTERPRETED=interpreted(),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _launch_down(
    gated_SI: Tensor,
    layer: ExpertWeights,
    order: ExpertOrder,
    parts_SD: Tensor,
    row_weights: Tensor | None,
    tiles: Tiles,
) -> None:
    intermediate, channels = gated_SI.shape[1], parts_SD.shape[1]
    x_by_map = tiles.tokens >= _ROWS_BY_MAP and intermediate * gated_SI.element_size() % 16 == 0
    grouped_down[(order.num_tiles * triton.cdiv(channels, tiles.channels),)](
        gated_SI,
        TensorDescriptor.from_tensor(gated_SI, [tiles.tokens, tiles.inputs]) if x_by_map else None,
        layer.weights_ENC,
        _copy_map(layer, tiles.channels, tiles.inputs),
        layer.bias_EN,
        layer.scales,
        row_weights,
        order.order_P,
        order.tiles_3L,
        parts_SD,
        order.num_tiles,
        *layer.weights_ENC.stride(),
        OUT=channels,
        IN=intermediate,
        SCALE_N=_part(layer.scales, 1, channels),
        SCALE_K=_part(layer.scales, 2, intermediate),
        INPUTS_FIRST=layer.inputs_first,
        BLOCK_M=tiles.tokens,
        BLOCK_N=tiles.channels,
        BLOCK_K=tiles.inputs,
        INTERPRETED=interpreted(),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _part(scales: Tensor | None, axis: int, size: int, *, halves: int = 1) -> int:
    """How many channels share a scale."""
    return 128 if scales is not None and scales.shape[axis] > halves else size


def _copy_map(layer: ExpertWeights, block_n: int, block_c: int) -> TensorDescriptor | None:
    """For the bulk tensor copy engine (TMA), which wants multiples of 16 bytes; None where they are not."""
    stored, block = layer.weights_ENC, [1, block_n, block_c]
    if layer.inputs_first:
        stored, block = stored.transpose(1, 2), [1, block_c, block_n]
    per_16_bytes = 16 // stored.element_size()
    if stored.stride(2) != 1 or stored.data_ptr() % 16 or any(s % per_16_bytes for s in stored.stride()[:2]):
        return None
    return TensorDescriptor.from_tensor(stored, block)
