"""Numbers in 8 bits: scaled, rounded to the nearest, saturating; NaN stays NaN; kernels and twins agree."""

import pytest
import torch
from torch import Tensor

from baton.kvcache.block_ops import convert_kv
from baton.kvcache.fp8 import dequantize, quantize
from baton.kvcache.kernels.blocks import convert
from baton.kvcache.layout import KVCacheLayout
from tests.device import DEVICE
from tests.unit.kvcache.caches import copy_of, new_cache, spec_of

# The interpreter computes with numpy, which warns where a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
SCALE, V_SCALE = torch.tensor(0.3), torch.tensor(7.0)


def every_bfloat16() -> Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_numbers_out_of_range_saturate_and_nan_stays(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    values = torch.tensor([largest, 2 * largest, -1e9, torch.inf, -torch.inf, torch.nan])
    stored = quantize(values, None, dtype).float()
    expected = torch.tensor([largest, largest, -largest, largest, -largest, torch.nan])
    torch.testing.assert_close(stored, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_the_nearest_number_is_stored(dtype: torch.dtype) -> None:
    grid = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).float()
    grid = grid[grid.isfinite()]
    values = torch.randn(500, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 500)
    scaled = (values / SCALE).clamp(grid.min(), grid.max())
    read = dequantize(quantize(values, SCALE, dtype), None, torch.float32)
    distance = (scaled[:, None] - grid).abs()
    assert torch.equal((scaled - read).abs(), distance.min(dim=1).values)


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_numbers_are_divided_by_their_scale_as_in_vllm(dtype: torch.dtype) -> None:
    """Times a rounded reciprocal, one of some thousand numbers is stored one step apart."""
    values, apart = every_bfloat16(), 0
    values = values[values.isfinite()].float()
    largest = torch.finfo(dtype).max
    for scale in torch.linspace(0.011, 3.1, 40):
        stored = quantize(values, scale, dtype)
        assert torch.equal(stored, (values / scale).clamp(-largest, largest).to(dtype))
        apart += int((stored != (values * (1 / scale)).clamp(-largest, largest).to(dtype)).sum())
    assert apart > 0


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_reading_gives_back_every_number_that_was_stored(dtype: torch.dtype) -> None:
    stored = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    finite = stored.float().isfinite()
    again = quantize(dequantize(stored, V_SCALE, torch.float32), V_SCALE, dtype)
    assert torch.equal(again.view(torch.uint8)[finite], stored.view(torch.uint8)[finite])


def test_other_dtypes_have_no_scale() -> None:
    values = torch.randn(8)
    assert torch.equal(quantize(values, SCALE, torch.bfloat16), values.to(torch.bfloat16))
    assert torch.equal(dequantize(values, SCALE, torch.bfloat16), values.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_the_kernel_stores_every_bfloat16_as_the_twin_does(dtype: torch.dtype) -> None:
    values = every_bfloat16().view(1, 16, 8, 4, 128)
    stored, expected = (torch.zeros(values.shape, dtype=dtype, device=device) for device in (DEVICE, "cpu"))
    convert(values.to(DEVICE), stored, scale=SCALE.to(DEVICE))
    convert_kv(values, expected, scale=SCALE)
    # The hardware chooses which NaN is stored.
    torch.testing.assert_close(stored.cpu().float(), expected.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("layout", [KVCacheLayout.NHD, KVCacheLayout.BLNC], ids=lambda layout: layout.label)
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("float32", "float8_e4m3fn"),
        ("float16", "float8_e5m2"),
        ("float8_e4m3fn", "float32"),
        ("float8_e5m2", "float32"),
        ("float8_e5m2", "float8_e4m3fn"),
    ],
)
def test_a_layer_is_converted_into_another_layout_as_the_twin_does(
    layout: KVCacheLayout, source: str, target: str
) -> None:
    other = KVCacheLayout.BLHNC if layout is KVCacheLayout.NHD else KVCacheLayout.LBNC
    cache = new_cache(spec_of(layout, source, head_dim=12), layout, 3, 5)
    if source == "float16":
        cache.storage.nan_to_num_()
    expected = new_cache(spec_of(other, target, head_dim=12), other, 3, 5)
    converted = copy_of(expected, DEVICE)
    convert_kv(cache.layer(1), expected.layer(1), scale=SCALE, v_scale=V_SCALE)
    on_device = copy_of(cache, DEVICE)
    convert(on_device.layer(1), converted.layer(1), scale=SCALE.to(DEVICE), v_scale=V_SCALE.to(DEVICE))
    torch.testing.assert_close(converted.view.cpu().float(), expected.view.float(), rtol=0, atol=0, equal_nan=True)


def test_a_conversion_there_and_back_changes_nothing() -> None:
    layout = KVCacheLayout.NHD
    (cache, back), in_8_bits = (
        (new_cache(spec_of(layout, "bfloat16"), layout, 3, 5) for _ in range(2)),
        new_cache(spec_of(layout, "float8_e4m3fn"), layout, 3, 5),
    )
    cache.storage.random_(-8, 9)
    k_scale, v_scale = torch.tensor(0.5), torch.tensor(4.0)
    convert_kv(cache.layer(0), in_8_bits.layer(0), scale=k_scale, v_scale=v_scale)
    assert torch.equal(in_8_bits.layer(0)[0].float(), cache.layer(0)[0].float() * 2)
    assert torch.equal(in_8_bits.layer(0)[1].float(), cache.layer(0)[1].float() / 4)
    convert_kv(in_8_bits.layer(0), back.layer(0), scale=k_scale, v_scale=v_scale)
    assert torch.equal(back.layer(0), cache.layer(0))
