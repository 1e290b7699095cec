"""Compares the Hopper kernels of 4-bit weights with references on small products."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from baton.models.config.quantization.mxfp4_config import MXFP4_BLOCK
from baton.models.formats.mxfp4_tiles import TILE, tile_
from baton.models.formats.packed import PackedWeight
from baton.models.kernels.activation import clamp_and_gate
from baton.models.kernels.moe.expert_order import order_by_expert
from baton.models.kernels.quantized import packed_few, packed_tma
from baton.models.kernels.quantized.mxfp4_experts import ClampedGate, Mxfp4Tile, multiply_tiled
from baton.models.kernels.quantized.packed_experts import Mxfp4Weight, multiply_experts
from baton.models.kernels.quantized.packed_gemm import Product
from baton.tritonlib.hopper_check import Pair

# Neither rows nor tokens fill whole tiles. There are counters for tiles that programs share.
_ROWS, _COLUMNS, _GROUP, _STEP = 208, 640, 128, 128
_EXPERTS, _CHOICES, _TOKENS, _TILE_TOKENS = 3, 2, 11, 16
_TILED_ROWS = 3 * TILE
_MXFP4_SCALES = (113, 121)  # of results that are mostly within the clamped gate's limits


def compare_products_on_hopper(device: torch.device) -> Iterator[Pair]:
    def multiply_few(product: Product, x_TK: Tensor, bias_N: Tensor, splits: int) -> Tensor:
        tile = next(tile for tile in packed_few.TILES if len(x_TK) <= tile.tokens)
        arrived, num_sms = product.arrived, product.num_sms
        return packed_few.multiply(
            x_TK, product.weight, bias_N, step=_STEP, arrived=arrived, num_sms=num_sms, tile=tile, splits=splits
        )

    def multiply_by_copies(product: Product, x_TK: Tensor, bias_N: Tensor, splits: int) -> Tensor:
        arrived, num_sms = product.arrived, product.num_sms
        return packed_tma.multiply(
            x_TK, product.weight, bias_N, step=_STEP, arrived=arrived, num_sms=num_sms, splits=splits
        )

    yield from compare_products(device, multiply_few, in_strips=True)
    yield from compare_products(device, multiply_by_copies, in_strips=True)


def compare_products(
    device: torch.device, multiply: Callable[[Product, Tensor, Tensor, int], Tensor], *, in_strips: bool = False
) -> Iterator[Pair]:
    """Results of `multiply`, whose last argument is the number of programs that share a tile, and the dequantized
    weight's."""
    numbers = torch.Generator(device).manual_seed(0)
    for zeros in (False, True):
        weight = _packed(numbers, (), zeros=zeros)
        weight_NK = weight.dequantized(torch.float32)
        product = Product.of(weight.into_strips() if in_strips else weight)
        bias_N = _normal(numbers, _ROWS)
        for tokens, splits in ((1, 3), (_TOKENS, 1)):
            x_TK = _normal(numbers, tokens, _COLUMNS)
            expected_TN = x_TK.float() @ weight_NK.T + bias_N.float()
            # Twice: the programs that share a tile count themselves from 0 again.
            multiply(product, x_TK, bias_N, splits)
            yield multiply(product, x_TK, bias_N, splits), expected_TN


def compare_experts_on_hopper(device: torch.device) -> Iterator[Pair]:
    return compare_experts(device, partial(multiply_experts, step=_STEP))


def compare_experts(device: torch.device, multiply: Callable[..., Tensor]) -> Iterator[Pair]:
    """Results of `multiply`, whose arguments are `multiply_experts`'s without `step`, and the portable kernel's."""
    numbers = torch.Generator(device).manual_seed(0)
    weight = _packed(numbers, (_EXPERTS,), zeros=True)
    experts_TK = torch.rand(_TOKENS, _EXPERTS, device=device, generator=numbers).topk(_CHOICES).indices
    order = order_by_expert(experts_TK, num_experts=_EXPERTS, tile_tokens=_TILE_TOKENS)
    shares_TK = torch.rand(_TOKENS, _CHOICES, device=device, generator=numbers)
    bias_EN = _normal(numbers, _EXPERTS, _ROWS)
    sizes = {"tokens": _TILE_TOKENS, "num_tokens": _TOKENS, "choices": _CHOICES}
    for is_first in (True, False):
        x_RK = _normal(numbers, _TOKENS if is_first else _TOKENS * _CHOICES, _COLUMNS)
        shares = None if is_first else shares_TK
        expected_RN = multiply_experts(x_RK, weight, bias_EN, order, shares, is_first=is_first, step=None, **sizes)
        yield multiply(x_RK, weight, bias_EN, order, shares, is_first=is_first, **sizes), expected_RN


def compare_tiled_experts_on_hopper(device: torch.device) -> Iterator[Pair]:
    return compare_tiled_experts(device, multiply_tiled)


def compare_tiled_experts(device: torch.device, multiply: Callable[..., Tensor]) -> Iterator[Pair]:
    """Results of `multiply`, whose arguments are `multiply_tiled`'s, and the portable kernel's."""
    numbers = torch.Generator(device).manual_seed(0)
    experts_TK = torch.rand(_TOKENS, _EXPERTS, device=device, generator=numbers).topk(_CHOICES).indices
    shares_TK = torch.rand(_TOKENS, _CHOICES, device=device, generator=numbers)
    gate = ClampedGate(limit=7.0, alpha=1.702)
    sizes = {"num_tokens": _TOKENS, "choices": _CHOICES}
    for tile in (Mxfp4Tile(8), Mxfp4Tile(8, by_warpgroup=False), Mxfp4Tile(16, row_tiles=2)):
        order = order_by_expert(experts_TK, num_experts=_EXPERTS, tile_tokens=tile.tokens)
        for is_first in (True, False):
            weight = _mxfp4(numbers)
            bias_EN = _normal(numbers, _EXPERTS, _TILED_ROWS)
            x_RK = _normal(numbers, _TOKENS if is_first else _TOKENS * _CHOICES, _COLUMNS)
            shares = None if is_first else shares_TK
            expected_RN = multiply_experts(
                x_RK, weight, bias_EN, order, shares, is_first=is_first, step=None, tokens=tile.tokens, **sizes
            )
            if is_first:
                expected_RN = clamp_and_gate(expected_RN, limit=gate.limit, alpha=gate.alpha)
            for expert in zip(weight.stored_ENB, weight.scales_ENG, strict=True):
                tile_(*expert)
            gate_of_first = gate if is_first else None
            yield multiply(x_RK, weight, bias_EN, gate_of_first, shares, order=order, tile=tile, **sizes), expected_RN


def _normal(numbers: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, device=numbers.device, generator=numbers).bfloat16()


def _integers(numbers: torch.Generator, first: int, stop: int, *shape: int) -> Tensor:
    return torch.randint(first, stop, shape, dtype=torch.uint8, device=numbers.device, generator=numbers)


def _packed(numbers: torch.Generator, experts: tuple[int, ...], *, zeros: bool) -> PackedWeight:
    groups = _COLUMNS // _GROUP
    scales_GN = (torch.rand(*experts, groups, _ROWS, device=numbers.device, generator=numbers) + 0.5) / 16
    return PackedWeight(
        _integers(numbers, 0, 256, *experts, _ROWS, _COLUMNS // 2),
        scales_GN.half(),
        _integers(numbers, 0, 16, *experts, groups, _ROWS) if zeros else None,
        4,
        _COLUMNS,
        _GROUP,
    )


def _mxfp4(numbers: torch.Generator) -> Mxfp4Weight:
    return Mxfp4Weight(
        _integers(numbers, 0, 256, _EXPERTS, _TILED_ROWS, _COLUMNS // 2),
        _integers(numbers, *_MXFP4_SCALES, _EXPERTS, _TILED_ROWS, _COLUMNS // MXFP4_BLOCK),
    )
