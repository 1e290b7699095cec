"""The kernels for weights of 4 bits on Hopper, against the dequantized weights, at the shapes of real models."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from baton.models.formats import mxfp4
from baton.models.formats.mxfp4_tiles import tile_
from baton.models.formats.packed import PackedWeight, pack_halves, stacked
from baton.models.kernels.quantized import packed_few, packed_tma
from baton.models.kernels.quantized.mxfp4_experts import ClampedGate, reads_tiles, run_tiled_experts
from baton.models.kernels.quantized.packed_experts import Mxfp4Weight, hopper_step, run_packed_experts
from baton.models.kernels.quantized.packed_gemm import Product
from baton.models.layers.mlp import silu_and_multiply
from baton.models.layers.moe.experts import run_experts, weighted_sum
from baton.tritonlib.hopper_check import is_hopper

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
# Sums in float32 are rounded to bfloat16 once.
BOUND = 4e-3


@pytest.fixture(autouse=True)
def _hopper() -> None:
    torch.manual_seed(0)
    if not is_hopper(DEVICE):
        pytest.skip("these kernels are for Hopper")


def packed(rows: int, columns: int, *, group: int, zeros: bool) -> PackedWeight:
    numbers = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, device=DEVICE)
    groups = -(-columns // group)
    return PackedWeight(
        pack_halves(numbers, 4),
        ((torch.rand(groups, rows, device=DEVICE) + 0.5) / 16).half(),
        torch.randint(0, 16, (groups, rows), dtype=torch.uint8, device=DEVICE) if zeros else None,
        4,
        columns,
        group,
    )


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


TILES = [(packed_few.multiply, tile) for tile in packed_few.TILES] + [
    (packed_tma.multiply, tile) for tile in packed_tma.TILES
]


@pytest.mark.parametrize(("multiply", "tile"), TILES)
@pytest.mark.parametrize(
    ("rows", "columns", "group", "zeros", "dtype"),
    [
        (6144, 4096, 128, False, torch.float16),
        (4096, 14336, 128, True, torch.bfloat16),
        (1008, 2880, 64, True, torch.float16),
        (144, 512, 512, False, torch.bfloat16),
    ],
)
def test_products_are_those_of_the_dequantized_weight(
    multiply: Callable[..., Tensor], tile: Any, rows: int, columns: int, group: int, zeros: bool, dtype: torch.dtype
) -> None:
    weight = packed(rows, columns, group=group, zeros=zeros)
    weight = replace(weight, scales_GN=weight.scales_GN.to(dtype))
    whole_NK = weight.dequantized(torch.float32)
    product = Product.for_inputs(weight, torch.bfloat16)
    assert product.weight.in_strips
    bias_N = torch.randn(rows, device=DEVICE).bfloat16()
    sizes = {"step": product.strips_step, "arrived": product.arrived, "num_sms": product.num_sms}
    most = tile.tokens if multiply is packed_few.multiply else 300
    for tokens in sorted({1, min(33, most), tile.tokens, most}):
        x_TK = torch.randn(tokens, columns, device=DEVICE).bfloat16()
        expected = linear(x_TK.float(), whole_NK, bias_N.float())
        for splits in (None, 1, 3):
            for _ in range(3):
                actual = multiply(x_TK, product.weight, bias_N, **sizes, tile=tile, splits=splits)
                assert error(actual, expected) < BOUND, (tokens, splits)
    assert not product.arrived.any()


@pytest.mark.parametrize("tokens", [1, 9, 64, 65, 300, 1500])
@pytest.mark.parametrize("rows", [1024, 20480])
def test_every_number_of_tokens_has_a_product(tokens: int, rows: int) -> None:
    weight = packed(rows, 2048, group=128, zeros=True)
    whole_NK = weight.dequantized(torch.float32)
    product = Product.for_inputs(weight, torch.bfloat16)
    wide_TK = torch.randn(tokens, 2049, device=DEVICE).bfloat16()
    for x_TK in (wide_TK[:, :2048].contiguous(), wide_TK[:, 1:]):  # rows of the other begin anywhere
        for batch_invariant in (False, True):
            actual = product(x_TK, None, batch_invariant=batch_invariant)
            assert error(actual, linear(x_TK.float(), whole_NK)) < BOUND


def test_products_read_inputs_in_the_order_of_a_reordered_weight() -> None:
    order_K = torch.randperm(4096, device=DEVICE)
    weight = replace(packed(4096, 4096, group=128, zeros=True), order_K=order_K)
    whole_NK = weight.dequantized(torch.float32)
    product = Product.for_inputs(weight, torch.bfloat16)
    for tokens in (1, 40):
        x_TK = torch.randn(tokens, 4096, device=DEVICE).bfloat16()
        assert error(product(x_TK, None, batch_invariant=False), linear(x_TK.float(), whole_NK)) < BOUND


def test_a_token_has_the_same_bits_in_every_batch() -> None:
    product = Product.for_inputs(packed(4096, 4096, group=128, zeros=True), torch.bfloat16)
    x_TK = torch.randn(70, 4096, device=DEVICE).bfloat16()
    together = product(x_TK, None, batch_invariant=True)
    for some in (slice(0, 1), slice(3, 12), slice(9, 30)):
        assert torch.equal(product(x_TK[some], None, batch_invariant=True), together[some])


@pytest.mark.parametrize("tokens", [1, 4, 32, 200])
def test_experts_of_integers_equal_the_dequantized_weights(tokens: int) -> None:
    gate_up = stacked([packed(1536, 2048, group=128, zeros=True) for _ in range(8)])
    down = stacked([packed(2048, 768, group=128, zeros=True) for _ in range(8)])
    x_TD = torch.randn(tokens, 2048, device=DEVICE).bfloat16() / 16
    assert hopper_step(gate_up, x_TD) is not None
    weights_TK = torch.rand(tokens, 3, device=DEVICE)
    experts_TK = torch.rand(tokens, 8, device=DEVICE).topk(3).indices

    def one(expert: int, x_RD: Tensor) -> Tensor:
        gated = silu_and_multiply(linear(x_RD, gate_up.expert(expert).dequantized(torch.float32).to(x_RD.dtype)))
        return linear(gated, down.expert(expert).dequantized(torch.float32).to(x_RD.dtype))

    expected = weighted_sum(run_experts(x_TD.float(), experts_TK, 8, one), weights_TK)
    actual = run_packed_experts(x_TD, weights_TK, experts_TK, gate_up, down, activate=silu_and_multiply)
    assert error(actual, expected) < 3 * BOUND


EXPERTS, SIZE, INNER = 8, 2880, 1472
GATE = ClampedGate(limit=7.0, alpha=1.7)


def experts_in_mxfp4(rows: int, columns: int, *, largest: int = 121) -> tuple[Mxfp4Weight, Tensor]:
    """All experts' weights, and as float32 [E, N, K]."""
    blocks = torch.randint(0, 256, (EXPERTS, rows, columns // 32, 16), dtype=torch.uint8, device=DEVICE)
    scales = torch.randint(largest - 8, largest + 1, (EXPERTS, rows, columns // 32), device=DEVICE).byte()
    for each in blocks:
        mxfp4.repack_(each)
    whole = torch.stack([mxfp4.dequantize(blocks[e], scales[e], dtype=torch.float32) for e in range(EXPERTS)])
    return Mxfp4Weight(blocks.flatten(2), scales), whole


def make_tiles_(weight: Mxfp4Weight) -> None:
    for expert in zip(weight.stored_ENB, weight.scales_ENG, strict=True):
        tile_(*expert)


def biases() -> tuple[Tensor, Tensor]:
    gate_up_EN, down_EN = (torch.randn(EXPERTS, rows, device=DEVICE) for rows in (2 * INNER, SIZE))
    return gate_up_EN.bfloat16(), down_EN.bfloat16()


def clamp_and_gate_pairs(both: Tensor) -> Tensor:
    gate, up = both[:, ::2].clamp(max=GATE.limit), both[:, 1::2].clamp(-GATE.limit, GATE.limit)
    return gate * torch.sigmoid(GATE.alpha * gate) * (up + 1)


@pytest.mark.parametrize("tokens", [1, 4, 32, 70, 200])
@pytest.mark.parametrize("largest", [121, 128, 140])
def test_experts_in_mxfp4_equal_the_dequantized_weights(tokens: int, largest: int) -> None:
    (gate_up, gate_up_ENK), (down, down_ENK) = (
        experts_in_mxfp4(2 * INNER, SIZE, largest=largest),
        experts_in_mxfp4(SIZE, INNER, largest=largest),
    )
    gate_up_bias_EN, down_bias_EN = biases()
    x_TD = torch.randn(tokens, SIZE, device=DEVICE).bfloat16() / 16
    weights_TK = torch.rand(tokens, 4, device=DEVICE)
    experts_TK = torch.rand(tokens, EXPERTS, device=DEVICE).topk(4).indices

    def one(expert: int, x_RD: Tensor) -> Tensor:
        gated = clamp_and_gate_pairs(linear(x_RD, gate_up_ENK[expert], gate_up_bias_EN[expert].float()))
        return linear(gated, down_ENK[expert], down_bias_EN[expert].float())

    expected = weighted_sum(run_experts(x_TD.float(), experts_TK, EXPERTS, one), weights_TK)
    has_tiles = reads_tiles(gate_up, torch.bfloat16)
    assert has_tiles == (largest <= 128)
    if has_tiles:
        make_tiles_(gate_up)
        make_tiles_(down)
    common = x_TD, weights_TK, experts_TK, gate_up, down
    for batch_invariant in (False, True):
        run = (
            partial(run_tiled_experts, *common, GATE)
            if has_tiles
            else partial(run_packed_experts, *common, activate=clamp_and_gate_pairs)
        )
        actual = run(gate_up_bias_EN=gate_up_bias_EN, down_bias_EN=down_bias_EN, batch_invariant=batch_invariant)
        assert error(actual, expected) < 4 * BOUND


def test_a_token_has_the_same_bits_in_every_batch_of_experts() -> None:
    gate_up, down = experts_in_mxfp4(2 * INNER, SIZE)[0], experts_in_mxfp4(SIZE, INNER)[0]
    make_tiles_(gate_up)
    make_tiles_(down)
    gate_up_bias_EN, down_bias_EN = biases()
    x_TD = torch.randn(70, SIZE, device=DEVICE).bfloat16() / 16
    weights_TK = torch.rand(70, 4, device=DEVICE)
    experts_TK = torch.rand(70, EXPERTS, device=DEVICE).topk(4).indices

    def run(rows: slice) -> Tensor:
        return run_tiled_experts(
            x_TD[rows],
            weights_TK[rows],
            experts_TK[rows],
            gate_up,
            down,
            GATE,
            gate_up_bias_EN=gate_up_bias_EN,
            down_bias_EN=down_bias_EN,
            batch_invariant=True,
        )

    together = run(slice(70))
    for some in (slice(0, 1), slice(3, 12), slice(9, 50)):
        assert torch.equal(run(some), together[some])
