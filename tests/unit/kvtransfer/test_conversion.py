"""How a sender converts KV for a receiver with another dtype, and which scales it accepts."""

from collections.abc import Sequence

import pytest

from baton.core.errors import PeerRefused
from baton.kvcache.spec import KVCacheSpec, KVKind
from kvtransfer.conversion import KVConversion, conversion_of
from kvtransfer.plan import WirePlan

GQA = KVCacheSpec(KVKind.GQA, num_layers=2, num_kv_heads=2, head_dim=8, dtype="float8_e4m3fn", windows=(0, 4))
MLA = KVCacheSpec(KVKind.MLA, num_layers=3, num_kv_heads=1, head_dim=24, dtype="float8_e5m2")


def plan_of(spec: KVCacheSpec, converted_from: str | None = "bfloat16") -> WirePlan:
    return WirePlan(1, spec, converted_from)


def test_equal_dtypes_need_no_conversion() -> None:
    assert conversion_of(plan_of(GQA, None), [1.0] * 4) is None


@pytest.mark.parametrize(("spec", "scales"), [(GQA, (0.5, 0.25, 1.5, 2.0)), (MLA, (0.5, 0.25, 1.5))])
def test_8_bits_take_the_receivers_scales(spec: KVCacheSpec, scales: tuple[float, ...]) -> None:
    assert conversion_of(plan_of(spec), scales) == KVConversion("bfloat16", spec.dtype, scales)


def test_other_dtypes_have_none() -> None:
    spec = KVCacheSpec(KVKind.GQA, 2, 2, 8, "bfloat16")
    conversion = conversion_of(plan_of(spec, "float32"), ())
    assert conversion == KVConversion("float32", "bfloat16")


@pytest.mark.parametrize(
    "scales", [(), (1.0,) * 3, (1.0,) * 5, (1.0, 1.0, 1.0, 0.0), (1.0, -1.0, 1.0, 1.0), (1.0, 1.0, float("nan"), 1.0)]
)
def test_scales_that_no_such_cache_can_have_are_refused(scales: Sequence[float]) -> None:
    with pytest.raises(PeerRefused, match=r"4 finite numbers above 0"):
        conversion_of(plan_of(GQA), scales)
