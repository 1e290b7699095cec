"""The product of few tokens with weights of 8 bits on Hopper: its tiles fit, its comparison refuses wrong kernels, and
layers use it for few tokens only. The kernel itself runs on no other device."""

import pytest
import torch
from torch import Tensor

from baton.models.config.quantization.config import Fp8Config, Granularity
from baton.models.formats import fp8
from baton.models.kernels.quantized import few_tokens, fp8_gemm, int8_gemm
from baton.models.kernels.quantized.few_tokens import DecodeTile, choose, compare
from baton.models.kernels.quantized.fp8_gemm import Weight
from baton.models.layers.linear import FusedLinear
from baton.models.quantization import fp8_linear
from baton.models.quantization.fp8_linear import Fp8Linear
from baton.tritonlib.hopper_check import HopperKernels, HopperVerdict, check
from tests.device import DEVICE

SMS = 132
# Of a multiprocessor, less what each of two programs takes for itself.
MEMORY = 225 << 10
PORTABLE = fp8_gemm.Fp8Tile(16, 64, weights_first=True, num_warps=4, num_stages=3)


def weight_of(rows: int, channels: int, rows_per_scale: int) -> Weight:
    """A weight that has only shapes. `rows_per_scale` of 1 means one column of scales."""
    with torch.device("meta"):
        columns = 1 if rows_per_scale == 1 else -(-channels // 128)
        scale_RC = torch.empty(-(-rows // rows_per_scale), columns)
        return Weight(torch.empty(rows, channels, dtype=fp8.E4M3), scale_RC, rows_per_scale, None, torch.empty(0))


@pytest.mark.parametrize("rows_per_scale", [1, 128])
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 32, 33, 64])
@pytest.mark.parametrize(
    ("rows", "channels"),
    [(6144, 4096), (4096, 4096), (4096, 14336), (28672, 4096), (12288, 4096), (2112, 7168), (64, 128)],
)
def test_all_programs_fit_at_once(rows: int, channels: int, num_tokens: int, rows_per_scale: int) -> None:
    tile = choose(num_tokens, weight_of(rows, channels, rows_per_scale), SMS)
    if tile is None:
        assert num_tokens > 16
        return
    assert num_tokens <= tile.tokens < 2 * max(num_tokens, 16)
    tiles, steps = -(-rows // tile.rows), -(-channels // (128 * tile.columns))
    assert tile.splits >= 1
    assert tiles <= fp8_gemm.num_counters(rows)
    num_bytes = tile.num_stages * tile.columns * (tile.rows + tile.tokens) * 128
    assert tiles * min(tile.splits, steps) <= MEMORY // num_bytes * SMS


@pytest.mark.parametrize(
    ("num_tokens", "weight"),
    [
        (0, weight_of(4096, 4096, 128)),
        (65, weight_of(4096, 4096, 128)),
        (33, weight_of(6144, 4096, 128)),
        (1, weight_of(4096, 4096, 32)),
        (1, weight_of(28672, 4096, 64)),
    ],
)
def test_others_multiply_more_tokens_and_scales_of_few_rows(num_tokens: int, weight: Weight) -> None:
    assert choose(num_tokens, weight, SMS) is None


def verdict(*, wrong: bool) -> HopperVerdict:
    def product(x_TK: Tensor, scale_TC: Tensor, weight: Weight, *, dtype: torch.dtype, tile: DecodeTile) -> Tensor:
        if x_TK.dtype == torch.int8:
            parts = (weight.stored_NK, weight.scale_RC, weight.bias, weight.arrived)
            out_TN = int8_gemm.multiply(x_TK, scale_TC, *parts, dtype=dtype, num_sms=SMS)
        else:
            out_TN = fp8_gemm.multiply(
                x_TK, scale_TC, weight, dtype=dtype, batch_invariant=False, tile=PORTABLE, splits=tile.splits
            )
        if wrong:
            out_TN[-1, 0] += out_TN.abs().max()
        return out_TN

    return check(HopperKernels("", lambda device: compare(device, product)), torch.device(DEVICE))


def test_the_comparison_passes_a_right_kernel_and_refuses_a_wrong_one() -> None:
    assert verdict(wrong=False).passed
    refused = verdict(wrong=True)
    assert not refused.passed
    assert not refused.reason


@pytest.mark.parametrize("weights", [Granularity.BLOCK, Granularity.CHANNEL])
def test_layers_use_it_for_few_tokens_unless_the_batch_must_not_matter(
    weights: Granularity, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    seen: list[int] = []

    def multiply(x_TK: Tensor, x_scale_TC: Tensor, weight: Weight, *, dtype: torch.dtype, tile: DecodeTile) -> Tensor:
        assert len(x_TK) <= tile.tokens
        seen.append(len(x_TK))
        return fp8_gemm.multiply(x_TK, x_scale_TC, weight, dtype=dtype, batch_invariant=False)

    monkeypatch.setattr(fp8_linear, "multiplies_fp8", lambda device: True)
    replaced = FusedLinear(288, (("gate_proj", 128), ("up_proj", 80)), dtype=torch.float32)
    layer = Fp8Linear(replaced, "", Fp8Config(weights, False), device=DEVICE)
    layer.requires_grad_(requires_grad=False)
    layer.weight.copy_(torch.randn(layer.weight.shape) * 60)
    for _, scale, _ in layer.checkpoint_scales():
        scale.fill_(0.01)
    layer.finish()
    x_TK = torch.randn(65, 288, device=DEVICE)
    expected_TN = layer(x_TK)
    monkeypatch.setattr(few_tokens, "multiply", multiply)
    monkeypatch.setattr(layer, "_num_sms", SMS)
    for num_tokens in (1, 32, 65):
        torch.testing.assert_close(layer(x_TK[:num_tokens]), expected_TN[:num_tokens], rtol=1e-4, atol=1e-2)
    layer.batch_invariant = True
    layer(x_TK[:1])
    assert seen == [1, 32]
