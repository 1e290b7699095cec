"""The comparisons of the Hopper kernels for weights of 4 bits accept right kernels and refuse wrong ones. Portable
kernels run in place of the Hopper kernels, which run on no other device."""

from typing import Any

import pytest
import torch
from torch import Tensor

from baton.models.kernels.quantized.packed_experts import multiply_experts
from baton.models.kernels.quantized.packed_gemm import Product
from baton.models.kernels.quantized.packed_probe import compare_experts, compare_products
from baton.tritonlib.hopper_check import HopperKernels, HopperVerdict, check
from tests.device import DEVICE

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


@pytest.mark.parametrize("probe", [products, experts])
def test_a_right_kernel_passes(probe: Any) -> None:
    assert probe(wrong=False).passed


@pytest.mark.parametrize("probe", [products, experts])
def test_a_wrong_kernel_is_refused(probe: Any) -> None:
    verdict = probe(wrong=True)
    assert not verdict.passed
    assert not verdict.reason
