"""Compares the Hopper kernels for prompts' experts with references on small layers. Legend as in `grouped_prompts`."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import silu

from baton.models.config.quantization.config import FP8_BLOCK
from baton.models.formats import fp8
from baton.models.kernels.moe import grouped_prompts
from baton.models.kernels.moe.expert_weights import ExpertWeights
from baton.models.kernels.moe.grouped_prompts import FP8, THREE_GROUPS, TWO_GROUPS, PromptTile
from baton.tritonlib.hopper_check import Pair

Multiply = Callable[[Tensor, Tensor, Tensor, ExpertWeights, ExpertWeights, PromptTile], Tensor]

# One expert has no tokens, and none has whole tiles of them.
_EXPERTS, _CHOICES, _TOKENS = 4, 2, 333
_CHANNELS, _INTERMEDIATE = 256, 128


def compare_on_hopper(device: torch.device) -> Iterator[Pair]:
    yield from compare(device, grouped_prompts.multiply)


def compare(device: torch.device, multiply: Multiply) -> Iterator[Pair]:
    """Yields the assignments' outputs of `multiply` and of torch, for each kind of tile."""
    random = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device)

    x_TD = draw(_TOKENS, _CHANNELS).bfloat16()
    experts_TK = draw(_TOKENS, _EXPERTS - 1).topk(_CHOICES).indices
    weights_TK = draw(_TOKENS, _CHOICES).sigmoid()
    shapes = (_EXPERTS, 2 * _INTERMEDIATE, _CHANNELS), (_EXPERTS, _CHANNELS, _INTERMEDIATE)
    for tile in (TWO_GROUPS, THREE_GROUPS, FP8):
        layers = []
        for experts, outputs, inputs in shapes:
            weights_ENC = draw(experts, outputs, inputs)
            if tile is FP8:
                scales = draw(experts, outputs // FP8_BLOCK, inputs // FP8_BLOCK).exp() / 16
                layers.append(ExpertWeights(weights_ENC.to(fp8.E4M3), scales=scales, power_of_two_inputs=True))
            else:
                layers.append(ExpertWeights(weights_ENC.div(16).bfloat16()))
        gate_up, down = layers
        expected_SD = multiply_in_torch(x_TD, weights_TK, experts_TK, gate_up, down)
        yield multiply(x_TD, weights_TK, experts_TK, gate_up, down, tile), expected_SD


def multiply_in_torch(
    x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: ExpertWeights, down: ExpertWeights
) -> Tensor:
    """The twin of `grouped_prompts.multiply`, in float32; outputs of experts below 0 are 0."""
    out_TKD = torch.zeros(*experts_TK.shape, x_TD.shape[1], device=x_TD.device)
    for expert in range(len(down.weights_ENC)):
        tokens, choices = torch.where(experts_TK == expert)
        gate_RI, up_RI = _product(x_TD[tokens], gate_up, expert).chunk(2, dim=1)
        gated_RI = (silu(gate_RI) * up_RI).to(x_TD.dtype)
        out_TKD[tokens, choices] = _product(gated_RI, down, expert) * weights_TK[tokens, choices, None]
    return out_TKD.flatten(0, 1)


def _product(x_RC: Tensor, layer: ExpertWeights, expert: int) -> Tensor:
    weight_NC = layer.weights_ENC[expert]
    if layer.scales is None:
        return x_RC.float() @ weight_NC.float().t()
    stored_RC, scales_RB = fp8.quantize_blocks(x_RC, power_of_two=layer.power_of_two_inputs)
    return fp8.multiply(stored_RC, scales_RB, weight_NC, layer.scales[expert], rows_per_scale=FP8_BLOCK)
