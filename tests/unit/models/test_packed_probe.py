"""The comparisons of the Hopper kernels for weights of 4 bits accept right kernels and refuse wrong ones. Portable
kernels run in place of the Hopper kernels, which run on no other device."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from baton.models.kernels.activation import clamp_and_gate
from baton.models.kernels.moe.expert_order import ExpertOrder
from baton.models.kernels.quantized.mxfp4_experts import ClampedGate, Mxfp4Tile
from baton.models.kernels.quantized.packed_experts import Mxfp4Weight, multiply_experts
from baton.models.kernels.quantized.packed_gemm import Product
from baton.models.kernels.quantized.packed_probe import compare_experts, compare_products, compare_tiled_experts
from baton.tritonlib.hopper_check import HopperKernels, HopperVerdict, check
from tests.device import DEVICE
from tests.unit.models.mxfp4_tiles import read_tiles

DEVICE_ = torch.device(DEVICE)


def products(*, wrong: bool) -> HopperVerdict:
    def multiply(product: Product, x_TK: Tensor, bias_N: Tensor, splits: int) -> Tensor:
        return product.by_kernel(x_TK, None if wrong else bias_N, splits=splits)

    return check(HopperKernels("products", lambda device: compare_products(device, multiply)), DEVICE_)


def experts(*, wrong: bool) -> HopperVerdict:
    def multiply(*arguments: Any, **options: Any) -> Tensor:
        out_RN = multiply_experts(*arguments, **options, step=None)
        if wrong:
            out_RN[-1, 0] += 2 * out_RN.abs().max()
        return out_RN

    return check(HopperKernels("experts", lambda device: compare_experts(device, multiply)), DEVICE_)


def tiled_experts(*, wrong: bool) -> HopperVerdict:
    def multiply(
        x_RC: Tensor,
        weight: Mxfp4Weight,
        bias_EN: Tensor,
        gate: ClampedGate | None,
        row_weights: Tensor | None,
        *,
        order: ExpertOrder,
        tile: Mxfp4Tile,
        num_tokens: int,
        choices: int,
    ) -> Tensor:
        assert order.order_P is not None
        assignments_P = order.order_P.long()
        rows_PK = x_RC if gate is None else x_RC[assignments_P // choices]
        out_PN = rows_PK.new_empty(num_tokens * choices, bias_EN.shape[1])
        for expert, first, stop in order.tiles_3L.T.tolist():
            places = slice(first, min(first + tile.tokens, stop))
            if expert >= 0:
                weight_NK = read_tiles(weight.stored_ENB[expert], weight.scales_ENG[expert])
                out_PN[places] = linear(rows_PK[places].float(), weight_NK, bias_EN[expert].float()).bfloat16()
        if wrong:
            out_PN[-1, 0] = 2 * out_PN.abs().max()
        if gate is not None:
            return clamp_and_gate(out_PN, limit=gate.limit, alpha=gate.alpha)
        assert row_weights is not None
        out_RN = torch.empty_like(out_PN)
        out_RN[assignments_P] = (out_PN * row_weights.flatten()[assignments_P, None]).bfloat16()
        return out_RN

    return check(HopperKernels("experts in tiles", lambda device: compare_tiled_experts(device, multiply)), DEVICE_)


@pytest.mark.parametrize("probe", [products, experts, tiled_experts])
def test_a_right_kernel_passes(probe: Any) -> None:
    assert probe(wrong=False).passed


@pytest.mark.parametrize("probe", [products, experts, tiled_experts])
def test_a_wrong_kernel_is_refused(probe: Any) -> None:
    verdict = probe(wrong=True)
    assert not verdict.passed
    assert not verdict.reason
