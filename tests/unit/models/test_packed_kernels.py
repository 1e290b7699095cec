"""Kernels for packed integers, mxfp4 and int8 against the dequantized weights.

Bounds: sums differ from float32's of the dequantized weight by its roundings; with activations in 16 bits the results
are rounded once more.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from baton.models.config.model_config import MoEConfig, Scoring, TopKMethod
from baton.models.families.moe.gpt_oss import Mxfp4Experts
from baton.models.families.moe.gpt_oss_config import GptOssSwitches
from baton.models.formats.packed import PackedWeight, pack_halves, stacked
from baton.models.kernels.quantized import int8_gemm
from baton.models.kernels.quantized.packed_experts import run_packed_experts
from baton.models.kernels.quantized.packed_gemm import MAX_TOKENS, Product
from baton.models.kernels.quantized.packed_tma import can_be_copied
from baton.models.layers.mlp import silu_and_multiply
from baton.models.layers.moe.experts import run_experts, weighted_sum
from tests.device import DEVICE

BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def packed(
    rows: int, columns: int, *, bits: int = 4, group: int = 128, zeros: bool = True, reordered: bool = False
) -> PackedWeight:
    numbers = torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8, device=DEVICE)
    groups = -(-columns // group)
    return PackedWeight(
        pack_halves(numbers, bits),
        ((torch.rand(groups, rows, device=DEVICE) + 0.5) / 2**bits).half(),
        torch.randint(0, 2**bits, (groups, rows), dtype=torch.uint8, device=DEVICE) if zeros else None,
        bits,
        columns,
        group,
        torch.randperm(columns, device=DEVICE) if reordered else None,
    )


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative error in the Euclidean norm."""
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def expected(weight: PackedWeight, x_TK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    return linear(x_TK.float(), weight.dequantized(torch.float32), None if bias_N is None else bias_N.float())


@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "splits", "dtype", "options"),
    [
        (1, 70, 512, 4, torch.bfloat16, {}),
        (1, 64, 288, 3, torch.float32, {"group": 32, "zeros": False}),
        (17, 64, 200, 1, torch.float16, {"group": 64}),
        (3, 64, 256, 2, torch.float32, {"group": 256, "reordered": True}),
        (40, 64, 256, 2, torch.bfloat16, {"bits": 8}),
        (70, 130, 160, 1, torch.float32, {"bits": 8, "group": 32, "zeros": False}),
    ],
)
def test_products_of_few_rows_equal_the_dequantized_weights(
    tokens: int, rows: int, columns: int, splits: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    weight = packed(rows, columns, **options)
    x_TK, bias_N = torch.randn(tokens, columns, device=DEVICE).to(dtype), torch.randn(rows, device=DEVICE).to(dtype)
    product = Product.of(weight)
    ordered_TK = x_TK if weight.order_K is None else x_TK[:, weight.order_K]
    first = product.by_kernel(ordered_TK, bias_N, splits=splits)
    assert error(first, expected(weight, x_TK, bias_N)) < BOUNDS[dtype]
    assert torch.equal(product.by_kernel(ordered_TK, bias_N, splits=splits), first)
    assert not product.arrived.any()
    assert error(product(x_TK, bias_N, batch_invariant=False), expected(weight, x_TK, bias_N)) < BOUNDS[dtype]


@pytest.mark.parametrize(("bits", "dtype"), [(4, torch.bfloat16), (8, torch.float16), (4, torch.float32)])
def test_many_rows_multiply_pieces_with_the_bits_of_the_dequantized_weight(bits: int, dtype: torch.dtype) -> None:
    weight = packed(100, 160, bits=bits, group=32, reordered=True)
    product = Product.of(weight)
    assert weight.order_K is not None
    assert torch.equal(product.dequantized_piece(slice(64, 100), dtype), weight.dequantized(dtype)[64:, weight.order_K])
    x_TK = torch.randn(MAX_TOKENS + 6, 160, device=DEVICE).to(dtype)
    assert error(product(x_TK, None, batch_invariant=False), expected(weight, x_TK)) < BOUNDS[dtype]


def test_pieces_of_a_weight_in_strips_are_the_same() -> None:
    weight = packed(144, 192, group=64)
    whole = weight.dequantized(torch.float32)
    strips = weight.into_strips()
    assert torch.equal(strips.dequantized(torch.float32), whole)
    assert torch.equal(Product.of(strips).dequantized_piece(slice(64, 144), torch.float32), whole[64:])


def test_groups_that_no_step_fits_are_dequantized() -> None:
    for weight in (packed(32, 96, group=24), packed(32, 96, group=48)):
        x_TK = torch.randn(5, 96, device=DEVICE)
        for batch_invariant in (False, True):
            product = Product.of(weight)
            assert error(product(x_TK, None, batch_invariant=batch_invariant), expected(weight, x_TK)) < 1e-6


def test_a_row_has_the_same_bits_in_every_batch() -> None:
    product = Product.of(packed(64, 256))
    x_TK = torch.randn(MAX_TOKENS + 9, 256, device=DEVICE).bfloat16()
    together = product(x_TK, None, batch_invariant=True)
    for rows in (slice(3, 4), slice(1, 20), slice(0, 40)):
        assert torch.equal(product(x_TK[rows], None, batch_invariant=True), together[rows])


# ---- experts


def chosen(tokens: int, experts: int, choices: int) -> tuple[Tensor, Tensor]:
    return torch.rand(tokens, choices, device=DEVICE), torch.rand(tokens, experts, device=DEVICE).topk(choices).indices


@pytest.mark.parametrize(
    ("tokens", "options"), [(2, {"group": 32}), (40, {"group": 128, "zeros": False}), (5, {"bits": 8, "group": 64})]
)
def test_experts_of_packed_integers_equal_the_dequantized_weights(tokens: int, options: dict[str, Any]) -> None:
    gate_up = stacked([packed(2 * 96, 160, **options) for _ in range(4)])
    down = stacked([packed(160, 96, **options) for _ in range(4)])
    weights_TK, experts_TK = chosen(tokens, 4, 2)
    x_TD, plus_TD = torch.randn(tokens, 160, device=DEVICE) / 16, torch.randn(tokens, 160, device=DEVICE)

    def one(expert: int, x_RD: Tensor) -> Tensor:
        gated = silu_and_multiply(linear(x_RD, gate_up.expert(expert).dequantized(torch.float32)))
        return linear(gated, down.expert(expert).dequantized(torch.float32))

    right = weighted_sum(run_experts(x_TD, experts_TK, 4, one), weights_TK) + plus_TD
    for batch_invariant in (False, True):
        out = run_packed_experts(
            x_TD,
            weights_TK,
            experts_TK,
            gate_up,
            down,
            activate=silu_and_multiply,
            batch_invariant=batch_invariant,
            plus_TD=plus_TD,
        )
        assert error(out, right) < 1e-5


@pytest.mark.parametrize(("tokens", "dtype"), [(1, torch.bfloat16), (3, torch.float32), (50, torch.float32)])
def test_experts_in_mxfp4_equal_the_dequantized_weights(tokens: int, dtype: torch.dtype) -> None:
    moe = MoEConfig(
        layers=(True,),
        num_experts=4,
        experts_per_token=2,
        intermediate_size=96,
        shared_intermediate_size=0,
        scoring=Scoring.SOFTMAX,
        method=TopKMethod.GREEDY,
        num_groups=1,
        groups_per_token=1,
        normalize_weights=True,
        weight_scale=1.0,
        router_bias=True,
    )
    with torch.device(DEVICE):
        experts = Mxfp4Experts(160, moe, GptOssSwitches(swiglu_limit=7.0, swiglu_alpha=1.7), dtype=dtype)
    for name, parameter in experts.named_parameters():
        if name.endswith("blocks"):
            parameter.random_(0, 256)
        elif name.endswith("scales"):
            parameter.random_(119, 124)
        else:
            parameter.data.normal_()
    experts.finish()
    weights_TK, experts_TK = chosen(tokens, 4, 2)
    x_TD = torch.randn(tokens, 160, device=DEVICE).to(dtype)
    # The activations between the two layers are also rounded.
    right = weighted_sum(run_experts(x_TD, experts_TK, 4, experts._one), weights_TK)
    assert error(experts.run_grouped(x_TD, weights_TK, experts_TK), right) < 2 * BOUNDS[dtype]


# ---- int8


@pytest.mark.parametrize(
    ("tokens", "static", "channels"),
    [(1, False, 1100), (20, True, 1100), (130, False, 1100), (20, False, 1104), (130, True, 1104)],
)
def test_int8_products_are_those_of_the_rounded_activations(tokens: int, static: bool, channels: int) -> None:
    weight_NK = torch.randint(-128, 128, (70, channels), dtype=torch.int8, device=DEVICE)
    scale_N, bias_N = torch.rand(70, device=DEVICE) / 128, torch.randn(70, device=DEVICE)
    x_TK = torch.randn(tokens, channels, device=DEVICE)
    given = torch.tensor(0.02, device=DEVICE) if static else None
    stored_TK, stored_T1 = int8_gemm.quantize_tokens(x_TK, given)
    scale_T1 = x_TK.abs().amax(1, keepdim=True) / 127 if given is None else given.expand(tokens, 1)
    rounded_TK = (x_TK / scale_T1).round().clamp(-128, 127)
    assert torch.equal(stored_TK.float(), rounded_TK)
    assert torch.equal(stored_T1, scale_T1)
    arrived = torch.zeros(int8_gemm.num_counters(70), dtype=torch.int32, device=DEVICE)
    out_TN = int8_gemm.multiply(
        stored_TK, stored_T1, weight_NK, scale_N, bias_N, arrived, dtype=torch.float32, num_sms=4
    )
    sums_TN = (rounded_TK.double() @ weight_NK.double().T).float()
    torch.testing.assert_close(out_TN, sums_TN * (scale_N * scale_T1) + bias_N, rtol=1e-6, atol=1e-5)
    assert not arrived.any()


@pytest.mark.parametrize("shared", [101_376, 166_912, 232_448])
@pytest.mark.parametrize("tokens", [1, 17, 64, 65, 128, 129, 4096])
def test_int8_tiles_fit_the_shared_memory(tokens: int, shared: int) -> None:
    for rows in (64, 4096, 28672):
        tile = int8_gemm.choose_tile(tokens, rows, 4096, num_sms=132, shared=shared)
        assert tile.num_stages * (tile.rows + tile.tokens) * 128 <= shared


def test_copies_need_rows_at_multiples_of_16_bytes() -> None:
    x_TK = torch.zeros(3, 520, dtype=torch.bfloat16, device=DEVICE)
    assert can_be_copied(x_TK[:, :512])
    assert not can_be_copied(x_TK[:, 1:513])
    assert not can_be_copied(torch.zeros(3, 516, dtype=torch.bfloat16, device=DEVICE)[:, :512])


def test_weights_for_strips_have_whole_strips_and_a_scale_for_each_step() -> None:
    def step(rows: int, columns: int, **options: Any) -> int | None:
        return Product.of(packed(rows, columns, **options)).strips_step

    assert step(144, 512) == 128
    assert step(144, 512, group=512) == 128
    assert step(144, 320, group=320) == step(144, 512, group=64) == 64
    assert step(136, 512) is None
    assert step(144, 512, group=32) is None
    assert step(144, 544, group=544) is None
    assert step(144, 512, bits=8) is None
