"""Scales of an fp8 cache, given or calculated."""

import pytest
import torch

from baton.kvcache.fp8 import dequantize, quantize
from baton.kvcache.scales import K_SCALE_CONSTANT, Q_SCALE_CONSTANT, V_SCALE_CONSTANT, KVScales
from tests.device import DEVICE


def test_calculated_scales_map_the_largest_number_to_the_range() -> None:
    scales = KVScales(calculate=True).to(DEVICE)
    q, k, v = (torch.tensor([[0.5, largest]], dtype=torch.bfloat16, device=DEVICE) for largest in (-3.0, 7.0, -20.0))
    scales.calc_kv_scales(q, k, v)
    expected = [3.0 / Q_SCALE_CONSTANT, 7.0 / K_SCALE_CONSTANT, 20.0 / V_SCALE_CONSTANT]
    assert [float(scale) for scale in scales.tensors] == pytest.approx(expected)
    assert not scales.calculate
    assert {scale.dtype for scale in scales.tensors} == {torch.float32}


def test_calculating_keeps_the_memory_that_a_captured_graph_reads() -> None:
    scales = KVScales(calculate=True).to(DEVICE)
    pointers = [scale.data_ptr() for scale in scales.tensors]
    scales.calc_kv_scales(*(torch.ones(2, 2, device=DEVICE) for _ in range(3)))
    assert pointers == [scale.data_ptr() for scale in scales.tensors]


def test_zeros_have_scale_one_so_that_nothing_is_divided_by_zero() -> None:
    scales = KVScales(calculate=True, k_scale=5.0).to(DEVICE)
    scales.calc_kv_scales(*(torch.zeros(2, 2, device=DEVICE) for _ in range(3)))
    assert [float(scale) for scale in scales.tensors] == [1.0, 1.0, 1.0]


def test_given_scales_are_not_part_of_a_checkpoint() -> None:
    scales = KVScales(q_scale=0.1, k_scale=0.2, v_scale=0.3)
    assert [float(scale) for scale in scales.tensors] == pytest.approx([0.1, 0.2, 0.3])
    assert not scales.calculate
    assert not scales.state_dict()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_calculated_scale_leaves_room_for_numbers_twice_as_large(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    first = torch.randn(100, device=DEVICE)
    scales = KVScales(calculate=True).to(DEVICE)
    scales.calc_kv_scales(first, first, first)
    for scale in scales.tensors:
        kept = dequantize(quantize(2 * first, scale, dtype), scale, torch.float32)
        assert float((kept - 2 * first).abs().max() / first.abs().max()) < 0.26
