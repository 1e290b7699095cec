"""A layer's experts on a GPU, in three launches after `order_by_expert`, without making the host wait.

The first product finds its rows of x through the order and applies the activation. The second one applies the routing
weights and writes each assignment to a row of its own, and the third launch adds up a token's experts in the order of
its choices. Shared experts, which compute every token, may be part of the same launches; their rows follow the
assignments' rows. Tiles depend on shapes alone, which the host knows: the router's choice stays on the device.

An expert's weights are read once per tile of its tokens, from memory the first time and then from L2. Few tokens per
expert get small tiles, so that many programs stream weights at once; many tokens get large tiles, for the tensor cores.
On Hopper, `grouped_prompts` computes both products of many tokens.

Legend: T token, D hidden channel, E expert, K chosen expert of a token, X shared expert, I intermediate channel, R row:
T*K assignments and X*T shared ones, N output channel, C input channel.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from baton.models.kernels.matmul.few_rows_in_order import adds_alike
from baton.models.kernels.moe import grouped_prompts
from baton.models.kernels.moe.expert_order import ExpertOrder, order_by_expert
from baton.models.kernels.moe.expert_sum import sum_choices
from baton.models.kernels.moe.expert_weights import ExpertWeights
from baton.models.kernels.moe.grouped_gemm_kernel import grouped_down, grouped_gate_up
from baton.models.kernels.moe.grouped_tiles import GroupedTiles, tiles_for
from baton.tritonlib.launch import interpreted, overlap

# With tiles of this many tokens or more, the copy engine (TMA) reads the second product's rows, which lie in order.
_ROWS_BY_MAP = 128
# Channels of each row of shared weights that go to the L2 cache while earlier kernels run, a power of two. A step of
# DeepSeek-V2-Lite of one token takes 1.2 % longer without them; prefetching more, or the routed experts' weights as
# soon as these are known, takes longer too.
_GATE_UP_PREFETCHED = 1024
_DOWN_PREFETCHED = 512


@dataclass(frozen=True)
class SharedWeights:
    """X experts that every token goes through, each of a routed expert's size and with silu, stored as one MLP.

    Attributes:
        gate_up_NC: [2*X*I, D], all gates before all ups. Both are contiguous.
        down_NC: [D, X*I].
        gates_T: float32, a factor of each token's shared experts; None: 1.
    """

    gate_up_NC: Tensor
    down_NC: Tensor
    gates_T: Tensor | None = None


@dataclass(frozen=True)
class GroupedActivation:
    """The activation: silu(gate) * up; with a limit, gate * sigmoid(alpha * gate) * (up + 1) with both clamped.

    Attributes:
        tanh_gelu: gelu(gate), approximated by tanh, * up.
        interleaved: gates at even channels and ups at odd ones, else all gates before all ups.
        squared_relu: there is no gate: relu(up) ** 2.
    """

    interleaved: bool = False
    limit: float | None = None
    alpha: float = 1.0
    tanh_gelu: bool = False
    squared_relu: bool = False


SILU = GroupedActivation()


def run_gated_experts(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    *,
    activation: GroupedActivation = SILU,
    weights_on_input: bool = False,
    batch_invariant: bool = False,
    shared: SharedWeights | None = None,
    plus_TD: Tensor | None = None,
    of: int | None = None,
) -> Tensor:
    """Returns the weighted sum of each token's experts, plus its shared experts, plus `plus_TD`.

    Args:
        x_TD: channels contiguous.
        weights_TK: float32.
        experts_TK: of any integer type; contiguous, as the weights are. A token's experts differ.
        weights_on_input: the weights multiply the experts' inputs instead of their outputs.
        batch_invariant: a token's bits do not depend on the number of tokens.
        shared: only together with routed experts that use silu.
        of: number of experts from which tokens chose, if the weights cover only some of them. `experts_TK` is then
            below 0 for the others, which contribute 0.
    """
    assert shared is None or activation == SILU
    num_tokens, choices = experts_TK.shape
    out_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    if not num_tokens:
        return out_TD
    num_experts, channels, intermediate = down.weights_ENC.shape
    if activation == SILU and _adds_alike(x_TD, gate_up):  # other activations were not compared
        batch_invariant = False  # bits are the same without
    if shared is None and activation == SILU and not (batch_invariant or weights_on_input):
        parts_SD = grouped_prompts.run(x_TD, weights_TK, experts_TK, gate_up, down, of=of)
        if parts_SD is not None:
            _launch_sum(parts_SD, plus_TD, None if of is None else experts_TK, out_TD, choices=choices)
            return out_TD
    tiles = tiles_for(
        num_assignments=num_tokens * choices,
        num_experts=num_experts if of is None else of,
        dtype=x_TD.dtype,
        fp8=gate_up.scales is not None,
        batch_invariant=batch_invariant,
    )
    partial = of is not None
    order = order_by_expert(experts_TK, num_experts=num_experts, tile_tokens=tiles.gate_up.tokens, partial=partial)
    num_shared = 0 if shared is None else shared.down_NC.shape[1] // intermediate
    rows = num_tokens * (choices + num_shared)
    gated_RI = x_TD.new_empty(rows, intermediate)
    _launch_gate_up(
        x_TD,
        gate_up,
        None if shared is None else shared.gate_up_NC.unsqueeze(0),
        None if shared is None else shared.gates_T,
        order,
        gated_RI,
        weights_TK if weights_on_input else None,
        activation,
        tiles.gate_up,
        choices=choices,
    )
    parts_RD = x_TD.new_empty(rows, channels)
    _launch_down(
        gated_RI,
        down,
        None if shared is None else shared.down_NC.view(channels, num_shared, intermediate).transpose(0, 1),
        order,
        parts_RD,
        None if weights_on_input else weights_TK,
        tiles.down,
        choices=choices,
        num_tokens=num_tokens,
    )
    _launch_sum(parts_RD, plus_TD, experts_TK if partial else None, out_TD, choices=choices)
    return out_TD


def multiply_by_expert(
    x_SC: Tensor, experts_TK: Tensor, layer: ExpertWeights, *, batch_invariant: bool = False, of: int | None = None
) -> Tensor:
    """Returns [S, N], the product of each assignment's row of x with its expert's weights. The rows of experts below 0
    are undefined. Other arguments are as in `run_gated_experts`."""
    num_tokens, choices = experts_TK.shape
    num_experts, outputs, _ = layer.weights_ENC.shape
    tiles = tiles_for(
        num_assignments=len(x_SC),
        num_experts=num_experts if of is None else of,
        dtype=x_SC.dtype,
        fp8=layer.scales is not None,
        batch_invariant=batch_invariant and not _adds_alike(x_SC, layer),
    ).down
    order = order_by_expert(experts_TK, num_experts=num_experts, tile_tokens=tiles.tokens, partial=of is not None)
    x_PC = x_SC if order.order_P is None else x_SC.index_select(0, order.order_P)
    out_SN = x_SC.new_empty(len(x_SC), outputs)
    _launch_down(x_PC, layer, None, order, out_SN, None, tiles, choices=choices, num_tokens=num_tokens)
    return out_SN


def _launch_gate_up(
    x_TD: Tensor,
    layer: ExpertWeights,
    shared_1NC: Tensor | None,
    shared_gates_T: Tensor | None,
    order: ExpertOrder,
    gated_RI: Tensor,
    row_weights: Tensor | None,
    activation: GroupedActivation,
    tiles: GroupedTiles,
    *,
    choices: int,
) -> None:
    num_tokens, intermediate = len(x_TD), gated_RI.shape[1]
    num_shared = len(gated_RI) // num_tokens - choices
    token_tiles = order.num_tiles + num_shared * triton.cdiv(num_tokens, tiles.tokens)
    columns = 2 * tiles.channels if activation.interleaved else tiles.channels
    grouped_gate_up[(token_tiles * triton.cdiv(intermediate, tiles.channels),)](
        x_TD,
        layer.weights_ENC,
        _copy_map(layer.weights_ENC, columns, tiles.inputs),
        layer.bias_EN,
        layer.scales,
        row_weights,
        shared_1NC,
        None if shared_1NC is None else _copy_map(shared_1NC, tiles.channels, tiles.inputs),
        shared_gates_T,
        order.order_P,
        order.tiles_3L,
        gated_RI,
        num_tokens,
        order.num_tiles,
        x_TD.stride(0),
        *layer.weights_ENC.stride(),
        activation.limit or 0.0,
        activation.alpha,
        CHOICES=choices,
        SHARED=num_shared,
        OUT=intermediate,
        IN=x_TD.shape[1],
        INTERLEAVED=activation.interleaved,
        CLAMPED=activation.limit is not None,
        TANH_GELU=activation.tanh_gelu,
        SQUARED_RELU=activation.squared_relu,
        SCALE_N=_part(layer.scales, 1, intermediate, halves=2),
        SCALE_K=_part(layer.scales, 2, x_TD.shape[1]),
        INPUTS_FIRST=layer.inputs_first,
        BLOCK_M=tiles.tokens,
        BLOCK_N=tiles.channels,
        BLOCK_K=tiles.inputs,
        PREFETCHED=_GATE_UP_PREFETCHED,
        INTERPRETED=interpreted(),
        **overlap(x_TD.device, rows=num_tokens),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _launch_down(
    gated_RI: Tensor,
    layer: ExpertWeights,
    shared_XNC: Tensor | None,
    order: ExpertOrder,
    parts_RD: Tensor,
    row_weights: Tensor | None,
    tiles: GroupedTiles,
    *,
    choices: int,
    num_tokens: int,
) -> None:
    intermediate, channels = gated_RI.shape[1], parts_RD.shape[1]
    num_shared = 0 if shared_XNC is None else len(shared_XNC)
    token_tiles = order.num_tiles + num_shared * triton.cdiv(num_tokens, tiles.tokens)
    x_by_map = tiles.tokens >= _ROWS_BY_MAP and intermediate * gated_RI.element_size() % 16 == 0
    grouped_down[(token_tiles * triton.cdiv(channels, tiles.channels),)](
        gated_RI,
        TensorDescriptor.from_tensor(gated_RI, [tiles.tokens, tiles.inputs]) if x_by_map else None,
        layer.weights_ENC,
        _copy_map(layer.weights_ENC, tiles.channels, tiles.inputs),
        layer.bias_EN,
        layer.scales,
        row_weights,
        shared_XNC,
        None if shared_XNC is None else _copy_map(shared_XNC, tiles.channels, tiles.inputs),
        order.order_P,
        order.tiles_3L,
        parts_RD,
        num_tokens,
        order.num_tiles,
        *layer.weights_ENC.stride(),
        CHOICES=choices,
        SHARED=num_shared,
        OUT=channels,
        IN=intermediate,
        SCALE_N=_part(layer.scales, 1, channels),
        SCALE_K=_part(layer.scales, 2, intermediate),
        INPUTS_FIRST=layer.inputs_first,
        BLOCK_M=tiles.tokens,
        BLOCK_N=tiles.channels,
        BLOCK_K=tiles.inputs,
        PREFETCHED=_DOWN_PREFETCHED,
        INTERPRETED=interpreted(),
        **overlap(gated_RI.device, rows=num_tokens),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _launch_sum(
    parts_RD: Tensor, plus_TD: Tensor | None, experts_TK: Tensor | None, out_TD: Tensor, *, choices: int
) -> None:
    """Adds up each token's parts and `plus_TD`. With `experts_TK`, parts of experts below 0 are left out."""
    num_tokens, channels = out_TD.shape
    block = min(triton.next_power_of_2(channels), 1024)
    sum_choices[(num_tokens, triton.cdiv(channels, block))](
        parts_RD,
        plus_TD,
        experts_TK,
        out_TD,
        num_tokens,
        0 if plus_TD is None else plus_TD.stride(0),
        CHOICES=choices,
        SHARED=len(parts_RD) // num_tokens - choices,
        CHANNELS=channels,
        BLOCK=block,
        **overlap(out_TD.device, rows=num_tokens),
        num_warps=4,
    )


def _adds_alike(x: Tensor, layer: ExpertWeights) -> bool:
    """Whether tiles of all sizes have the same bits: those of 16-bit numbers, multiplied by Hopper's instruction."""
    return layer.scales is None and x.element_size() == 2 and adds_alike(x.device)


def _part(scales: Tensor | None, axis: int, size: int, *, halves: int = 1) -> int:
    """Returns the number of channels that share a scale."""
    return 128 if scales is not None and scales.shape[axis] > halves else size


def _copy_map(weights_ENC: Tensor, block_n: int, block_c: int) -> TensorDescriptor | None:
    """Returns a descriptor for the copy engine (TMA); None if strides or address are no multiples of 16 bytes."""
    stored, block = weights_ENC, [1, block_n, block_c]
    if stored.stride(2) != 1:
        stored, block = stored.transpose(1, 2), [1, block_c, block_n]
    per_16_bytes = 16 // stored.element_size()
    if stored.stride(2) != 1 or stored.data_ptr() % 16 or any(s % per_16_bytes for s in stored.stride()[:2]):
        return None
    return TensorDescriptor.from_tensor(stored, block)
