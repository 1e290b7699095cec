"""Slots for recurrent states share the cache's memory with blocks."""

import pytest

from baton.core.errors import ConfigError
from baton.engine.cache_size import choose_state_slots
from baton.kvcache.spec import KVCacheSpec, KVKind

MIB = 1 << 20
SPEC = KVCacheSpec(KVKind.GQA, 2, 2, 64, "bfloat16", state=KVCacheSpec(KVKind.STATE, 4, 16, MIB // 4 // 64, "float32"))


@pytest.mark.parametrize(
    ("given", "seats", "most_mib", "slots"), [(0, 4, 1000, 12), (0, 64, 100, 100), (0, 64, 5, 5), (7, 64, 100, 7)]
)
def test_slots_fit_the_memory_for_states(given: int, seats: int, most_mib: int, slots: int) -> None:
    assert SPEC.bytes_per_slot == MIB
    assert choose_state_slots(given, SPEC, seats=seats, most_bytes=most_mib * MIB) == slots


def test_a_model_without_states_has_no_slots() -> None:
    plain = KVCacheSpec(KVKind.GQA, 2, 2, 64, "bfloat16")
    assert choose_state_slots(5, plain, seats=4, most_bytes=0) == 0


@pytest.mark.parametrize(("given", "field"), [(9, "state_slots"), (0, "kv_cache_mib")])
def test_too_little_memory_is_refused_with_a_cure(given: int, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_state_slots(given, SPEC, seats=4, most_bytes=MIB)
    assert caught.value.field == field
    assert caught.value.cure
