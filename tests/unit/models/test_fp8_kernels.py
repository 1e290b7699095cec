"""The kernels of fp8 products equal their twins in plain torch: activations to the bit, sums to float32's rounding."""

from functools import partial

import pytest
import torch
from torch import Tensor

from baton.models.config.quantization.config import Fp8Config, Granularity
from baton.models.formats import fp8
from baton.models.kernels.quantized import fp8_gemm, fp8_quantize
from baton.models.kernels.quantized.fp8_gemm import Fp8Tile
from baton.models.layers.linear import FusedLinear, Linear
from baton.models.quantization import fp8_linear
from baton.models.quantization.fp8_linear import Fp8Linear
from tests.device import DEVICE

SMALL = Fp8Tile(16, 64, weights_first=True, num_warps=4, num_stages=3)
LARGE = Fp8Tile(64, 64, weights_first=False, num_warps=4, num_stages=3)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def activations(tokens: int, channels: int) -> Tensor:
    """Rows of very different sizes, one of them only zeros."""
    sizes_T1 = torch.tensor([1.0, 1e-3, 3e4, 0.0, 1e-20, 7.0]).repeat(tokens)[:tokens, None]
    return (torch.randn(tokens, channels) * sizes_T1).to(DEVICE)


def bits(stored: Tensor) -> Tensor:
    return stored.cpu().view(torch.uint8)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("channels", [300, 1280])
def test_activations_are_quantized_as_by_the_twin(channels: int, power_of_two: bool) -> None:
    x_TK = activations(6, channels)
    for kernel, twin in (
        (fp8_quantize.launch_blocks(x_TK, power_of_two=power_of_two), fp8.quantize_blocks),
        (
            fp8_quantize.launch_blocks(x_TK, power_of_two=power_of_two, multiple_of=4),
            partial(fp8.quantize_blocks, multiple_of=4),
        ),
        (fp8_quantize.launch_tokens(x_TK, None, power_of_two=power_of_two), fp8.quantize_tokens),
    ):
        stored_TK, scale_TC = twin(x_TK.cpu(), power_of_two=power_of_two)
        assert torch.equal(bits(kernel[0]), bits(stored_TK))
        assert torch.equal(kernel[1].cpu(), scale_TC)
        assert kernel[1].stride() == scale_TC.stride()


def test_numbers_in_the_middle_of_two_are_rounded_as_by_the_twin() -> None:
    """All products of mantissas that bfloat16 has: some are such numbers, but for the last bit of a scale."""
    largest_T1 = torch.arange(128, 256)[:, None]
    x_TK = torch.arange(256).expand(128, 256).minimum(largest_T1).bfloat16()
    for kernel, twin in (
        (fp8_quantize.launch_blocks(x_TK.to(DEVICE), power_of_two=False), fp8.quantize_blocks),
        (fp8_quantize.launch_tokens(x_TK.to(DEVICE), None, power_of_two=False), fp8.quantize_tokens),
    ):
        for device in {DEVICE, "cpu"}:
            stored_TK, scale_TC = twin(x_TK.to(device))
            assert torch.equal(bits(kernel[0]), bits(stored_TK))
            assert torch.equal(kernel[1].cpu(), scale_TC.cpu())


def test_rows_of_a_larger_tensor_and_a_scale_that_saturates() -> None:
    x_TK = activations(6, 400)[:, 50:250]
    scale = torch.tensor(0.013, device=DEVICE)
    stored_TK, scale_T1 = fp8_quantize.launch_tokens(x_TK, scale, power_of_two=False)
    expected_TK, _ = fp8.quantize_static(x_TK.cpu(), scale.cpu())
    assert torch.equal(bits(stored_TK), bits(expected_TK))
    assert float(stored_TK.float().max()) == 448.0
    assert scale_T1.unique().tolist() == [pytest.approx(0.013)]


@pytest.mark.parametrize("power_of_two", [False, True])
def test_scales_map_the_largest_number_to_the_largest_that_fp8_has(power_of_two: bool) -> None:
    x_TK = torch.randn(4, 256)
    stored_TK, scale_TC = fp8.quantize_blocks(x_TK, power_of_two=power_of_two)
    largest = stored_TK.float().view(4, 2, 128).abs().amax(-1)
    assert bool(((largest > 223) & (largest <= 448)).all())
    assert power_of_two or bool((largest == 448).all())
    meant = stored_TK.float() * scale_TC.repeat_interleave(128, dim=1)
    assert float((meant - x_TK).abs().max()) <= float(x_TK.abs().max()) * (2**-4 if not power_of_two else 2**-3)
    if power_of_two:
        assert torch.equal(scale_TC.log2(), scale_TC.log2().round())


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


def expected(x_TK: Tensor, scale_TC: Tensor, weight: fp8_gemm.Weight) -> Tensor:
    parts = (x_TK.cpu(), scale_TC.cpu(), weight.stored_NK.cpu(), weight.scale_RC.cpu())
    out_TN = fp8.multiply(*parts, rows_per_scale=weight.rows_per_scale)
    return out_TN if weight.bias is None else out_TN + weight.bias.cpu()


@pytest.mark.parametrize(
    ("tokens", "rows", "channels", "rows_per_scale", "tile", "splits"),
    [
        (3, 100, 320, 128, SMALL, 1),
        (3, 100, 320, 128, SMALL, 2),
        (16, 130, 256, 64, SMALL, 1),
        (20, 70, 256, 32, SMALL, 2),
        (5, 70, 272, 1, SMALL, 3),
        (70, 130, 272, 128, LARGE, 1),
        (40, 70, 256, 16, LARGE, 1),
        (40, 70, 256, 1, LARGE, 2),
        (150, 70, 16, 128, SMALL, 1),  # ten tiles of tokens: a whole group and a smaller one
    ],
)
def test_products_equal_the_twins(
    tokens: int, rows: int, channels: int, rows_per_scale: int, tile: Fp8Tile, splits: int
) -> None:
    weight = weight_of(rows, channels, rows_per_scale, bias=tokens == 5)
    quantize = fp8.quantize_tokens if rows_per_scale == 1 else fp8.quantize_blocks
    x_TK, scale_TC = quantize(torch.randn(tokens, channels, device=DEVICE))
    expected_TN = expected(x_TK, scale_TC, weight)
    # Tensor cores keep about 14 bits where they add up products of fp8, not the 24 of float32.
    atol = 1e-2 if DEVICE == "cpu" else 1e-2 * float(expected_TN.std())
    for _ in range(2):  # a launch leaves its counters as the next one needs them
        out_TN = fp8_gemm.multiply(
            x_TK, scale_TC, weight, dtype=torch.float32, batch_invariant=False, tile=tile, splits=splits
        )
        torch.testing.assert_close(out_TN.cpu(), expected_TN, rtol=1e-4, atol=atol)
        assert not weight.arrived.any()


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 32, 33, 64, 65, 256, 257, 8192])
@pytest.mark.parametrize(("rows", "channels"), [(6144, 4096), (4096, 14336), (2112, 7168), (64, 128), (28672, 4096)])
def test_counters_and_channels_suffice_for_every_split(
    num_tokens: int, rows: int, channels: int, blocked: bool
) -> None:
    tile = fp8_gemm.choose_tile(num_tokens, rows, num_sms=132, blocked=blocked)
    splits = fp8_gemm.choose_splits(tile, num_tokens, rows, channels, num_sms=132)
    tiles = -(-num_tokens // tile.tokens) * -(-rows // tile.rows)
    assert 1 <= splits <= max(1, channels // 512)
    assert splits == 1 or tiles <= fp8_gemm.num_counters(rows)
    assert splits == 1 or tiles * splits <= 3 * 132


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 32, 33, 64])
def test_tiles_of_few_tokens_run_at_once(num_tokens: int) -> None:
    """Those of 64 rows three on a multiprocessor; where these are too many, half as many of 128 rows."""
    for rows, of_a_tile in ((3 * 132 * 64, 64), (3 * 132 * 64 + 64, 128)):
        tile = fp8_gemm.choose_tile(num_tokens, rows, num_sms=132, blocked=True)
        assert (tile.rows, tile.weights_first) == (of_a_tile, True)
        assert num_tokens <= tile.tokens < 2 * max(num_tokens, 16)


LAYERS = [
    (Granularity.BLOCK, False, (("q_proj", 130), ("k_proj", 70))),
    (Granularity.BLOCK, False, (("gate_proj", 128), ("up_proj", 60))),
    (Granularity.CHANNEL, False, (("o_proj", 100),)),
    (Granularity.TENSOR, False, (("q_proj", 40), ("k_proj", 24))),
    (Granularity.TENSOR, True, (("q_proj", 40), ("k_proj", 24))),
]


@pytest.mark.parametrize("tokens", [2, 18])
@pytest.mark.parametrize(("weights", "static", "parts"), LAYERS)
def test_a_layer_multiplies_in_fp8_as_with_its_dequantized_weights(
    weights: Granularity,
    static: bool,
    parts: tuple[tuple[str, int], ...],
    tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU, here by the kernels in the interpreter: off by the rounding of activations alone."""
    monkeypatch.setattr(fp8_linear, "multiplies_fp8", lambda device: True)
    fused, single = FusedLinear(288, parts, dtype=torch.float32), Linear(288, 100, dtype=torch.float32)
    layer = Fp8Linear(fused if len(parts) > 1 else single, parts[0][0], Fp8Config(weights, static), device=DEVICE)
    layer.requires_grad_(requires_grad=False)
    layer.weight.copy_(torch.randn(layer.weight.shape) * 60)
    for index, (_, scale, input_scale) in enumerate(layer.checkpoint_scales()):
        scale.copy_(torch.rand(scale.shape) * 0.01 + 0.01 * (index + 1))
        if input_scale is not None:
            input_scale.fill_(0.01)
    layer.finish()
    x_TK = torch.randn(tokens, 288, device=DEVICE)
    exact = x_TK @ layer.dequantized(torch.float32).T
    out = layer(x_TK)
    assert out.shape == exact.shape
    assert 1e-3 < float((out - exact).std() / exact.std()) < 0.06
    layer.batch_invariant = True
    torch.testing.assert_close(layer(x_TK), out, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(layer(x_TK[None]), layer(x_TK)[None])
