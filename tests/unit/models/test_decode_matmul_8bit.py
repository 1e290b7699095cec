"""The product for few rows and weights of 8 bits equals its twins; its kernel runs in the interpreter."""

import pytest
import torch
from torch import Tensor

from models.kernels import decode_matmul_8bit, fp8_gemm, int8_gemm
from models.kernels.decode_matmul_8bit import MAX_TOKENS, Tile, choose, multiply, serves
from models.linear import Linear
from models.quantization import fp8, fp8_linear
from models.quantization.config import Fp8Config, Granularity
from models.quantization.fp8_linear import Fp8Linear
from tests.device import DEVICE

SMALL = Tile(16, 64, num_warps=4, num_stages=3)
# (tokens, rows, channels, rows that share a scale): rows and channels that no tile divides, and one block of channels
SHAPES = [(3, 100, 320, 128), (16, 130, 256, 64), (5, 70, 272, 32), (1, 64, 128, 128)]
SMS = 132


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def activations(tokens: int, channels: int) -> Tensor:
    """Rows of very different sizes, one of them only zeros."""
    sizes_T1 = torch.tensor([1.0, 1e-3, 3e4, 0.0, 1e-20, 7.0]).repeat(tokens)[:tokens, None]
    return (torch.randn(tokens, channels) * sizes_T1).bfloat16().to(DEVICE)


def weight_of(rows: int, channels: int, rows_per_scale: int, *, bias: bool = False) -> fp8_gemm.Weight:
    """`rows_per_scale` of 1 means one column of scales."""
    columns = 1 if rows_per_scale == 1 else -(-channels // 128)
    return fp8_gemm.Weight(
        (torch.randn(rows, channels) * 60).to(fp8.E4M3).to(DEVICE),
        (torch.rand(-(-rows // rows_per_scale), columns) + 0.5).to(DEVICE),
        rows_per_scale,
        torch.randn(rows).to(DEVICE) if bias else None,
        torch.zeros(64, dtype=torch.int32, device=DEVICE),
    )


def check(out_TN: Tensor, stored_TK: Tensor, scale_TC: Tensor, weight: fp8_gemm.Weight) -> None:
    parts = (stored_TK.cpu(), scale_TC.cpu(), weight.stored_NK.cpu(), weight.scale_RC.cpu())
    expected_TN = fp8.multiply(*parts, rows_per_scale=weight.rows_per_scale)
    if weight.bias is not None:
        expected_TN += weight.bias.cpu()
    # Tensor cores keep about 14 bits where they add up products of fp8, not the 24 of float32.
    atol = 1e-2 if DEVICE == "cpu" else 1e-2 * float(expected_TN.std())
    torch.testing.assert_close(out_TN.cpu(), expected_TN, rtol=1e-4, atol=atol)
    assert not weight.arrived.any(), "counters are left as they were found"


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("splits", [1, 2, 100])
@pytest.mark.parametrize(("tokens", "rows", "channels", "rows_per_scale"), SHAPES)
def test_blocks_are_quantized_by_the_product_as_before_it(
    tokens: int, rows: int, channels: int, rows_per_scale: int, splits: int, power_of_two: bool
) -> None:
    weight = weight_of(rows, channels, rows_per_scale, bias=tokens == 5)
    x_TK = activations(tokens, channels)
    tile = SMALL._replace(splits=splits)
    out_TN = multiply(x_TK, None, weight, dtype=torch.float32, tile=tile, power_of_two=power_of_two)
    check(out_TN, *fp8.quantize_blocks(x_TK, power_of_two=power_of_two), weight)


def test_rounding_activations_has_the_bits_of_the_kernel_before_the_product() -> None:
    """Every product is one number, so its bits show those of the activation and its scale."""
    x_TK = activations(6, 256)
    weight = weight_of(256, 256, 128)
    weight.stored_NK.copy_(torch.eye(256))
    weight.scale_RC.fill_(1)
    stored_TK, scale_TC = fp8.quantize_blocks(x_TK)
    expected_TK = stored_TK.float() * scale_TC.repeat_interleave(128, dim=1)
    assert torch.equal(multiply(x_TK, None, weight, dtype=torch.float32, tile=SMALL), expected_TK)


@pytest.mark.parametrize("splits", [1, 3])
def test_one_scale_for_all_and_a_scale_for_each_token(splits: int) -> None:
    weight, x_TK = weight_of(70, 272, 1, bias=True), activations(20, 272)
    tile = Tile(32, 128, num_warps=8, num_stages=3, splits=splits)
    scale = torch.tensor(0.013, device=DEVICE)
    out_TN = multiply(x_TK, scale, weight, dtype=torch.float32, tile=tile)
    check(out_TN, *fp8.quantize_static(x_TK, scale), weight)
    stored_TK, scale_T1 = fp8.quantize_tokens(x_TK)
    out_TN = multiply(stored_TK, scale_T1, weight, dtype=torch.float32, tile=tile)
    check(out_TN, stored_TK, scale_T1, weight)


@pytest.mark.parametrize("splits", [1, 3])
def test_integers_have_the_bits_of_the_product_for_any_rows(splits: int) -> None:
    weight_NK = torch.randint(-127, 128, (70, 272), dtype=torch.int8, device=DEVICE)
    scale_N, bias_N = torch.rand(70, device=DEVICE), torch.randn(70, device=DEVICE)
    stored_TK, scale_T = int8_gemm.quantize_tokens(activations(5, 272), None)
    arrived = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    weight = fp8_gemm.Weight(weight_NK, scale_N[:, None], 1, bias_N, arrived)
    expected_TN = int8_gemm.multiply(
        stored_TK, scale_T, weight_NK, scale_N, bias_N, arrived, dtype=torch.bfloat16, num_sms=1
    )
    out_TN = multiply(stored_TK, scale_T, weight, dtype=torch.bfloat16, tile=SMALL._replace(splits=splits))
    assert torch.equal(out_TN, expected_TN)
    assert not arrived.any()


def test_a_tile_holds_all_tokens_and_keeps_the_multiprocessors_busy() -> None:
    for num_tokens in (1, 16, 17, MAX_TOKENS):
        for rows, channels in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
            tile = choose(num_tokens, rows, channels, SMS)
            programs = -(-rows // tile.rows) * tile.splits
            assert tile.tokens >= num_tokens
            assert tile.splits <= channels // 128
            assert programs / (-(-programs // SMS) * SMS) > 0.7
            assert -(-rows // tile.rows) <= fp8_gemm.num_counters(rows)


def test_many_tokens_and_rows_that_the_copy_engine_cannot_read_are_others() -> None:
    x_TK = torch.zeros(MAX_TOKENS + 1, 272, dtype=torch.bfloat16, device=DEVICE)
    assert serves(x_TK[:-1])
    assert not serves(x_TK)
    assert not serves(x_TK[:0])
    assert not serves(x_TK[:2, 1:257])
    assert not serves(x_TK[:2].float())


KINDS = [(Granularity.BLOCK, False), (Granularity.CHANNEL, False), (Granularity.TENSOR, True)]


@pytest.mark.parametrize(("weights", "static"), KINDS)
def test_a_layer_multiplies_few_rows_by_it(weights: Granularity, static: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, here by the kernels in the interpreter."""
    monkeypatch.setattr(fp8_linear, "multiplies_fp8", lambda device: True)
    monkeypatch.setattr(decode_matmul_8bit, "runs_on", lambda device: True)
    layer = Fp8Linear(Linear(288, 100, dtype=torch.bfloat16), "o_proj", Fp8Config(weights, static), device=DEVICE)
    layer.requires_grad_(requires_grad=False)
    layer.weight.copy_(torch.randn(layer.weight.shape) * 60)
    for _, scale, input_scale in layer.checkpoint_scales():
        scale.copy_(torch.rand(scale.shape) * 0.01 + 0.01)
        if input_scale is not None:
            input_scale.fill_(0.01)
    layer.finish()
    x_TK = torch.randn(4, 288, device=DEVICE).bfloat16()
    out_TN = layer(x_TK)
    layer.batch_invariant = True
    torch.testing.assert_close(out_TN, layer(x_TK), rtol=2**-7, atol=1e-3 * float(out_TN.float().std()))
