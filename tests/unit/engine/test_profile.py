"""How a GPU's memory is shared out and its step size chosen: the arithmetic, from numbers as a profile gives them."""

import pytest

from baton.errors import ConfigError
from engine.profile import DeviceMemory, MemoryPlan, Profile, choose_step_tokens, plan_memory

GIB = 1 << 30
PROFILE = Profile({1024: 0.1}, step_bytes=2 * GIB, decode_bytes=GIB // 4)
MEMORY = DeviceMemory(total=100 * GIB, used=15 * GIB, free=84 * GIB)


def planned(
    memory: DeviceMemory = MEMORY, *, fraction: float = 0.9, graphs: bool = True, least_bytes: int = GIB
) -> MemoryPlan:
    return plan_memory(memory, PROFILE, fraction=fraction, reserved_bytes=GIB, graphs=graphs, least_bytes=least_bytes)


def test_the_smallest_step_that_is_nearly_as_fast_as_the_fastest_is_chosen() -> None:
    assert choose_step_tokens({512: 0.020, 1024: 0.030, 2048: 0.058, 4096: 0.115}) == 1024
    assert choose_step_tokens({512: 0.020, 1024: 0.021, 2048: 0.023}) == 2048
    assert choose_step_tokens({300: 1.0}) == 300


def test_the_parts_fill_the_fraction_exactly() -> None:
    plan = planned()
    assert plan.weights + plan.kv_cache + plan.steps + plan.graphs + plan.reserved == 90 * GIB
    assert planned(graphs=False).kv_cache == plan.kv_cache + plan.graphs


def test_what_others_have_taken_is_not_promised() -> None:
    crowded = DeviceMemory(total=100 * GIB, used=15 * GIB, free=30 * GIB)
    plan = planned(crowded)
    assert plan.kv_cache + plan.steps + plan.graphs + plan.reserved == 30 * GIB


def test_two_nodes_with_half_a_fraction_each_fit_on_one_gpu() -> None:
    first = planned(fraction=0.45)
    second = planned(DeviceMemory(total=100 * GIB, used=15 * GIB, free=(100 - 45 - 15) * GIB), fraction=0.45)
    assert second == first


def test_too_little_for_a_cache_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="MiB are left for the KV cache") as raised:
        planned(fraction=0.2, least_bytes=2 * GIB)
    assert raised.value.field == "gpu_memory_fraction"
    assert "--max-batch-tokens" in raised.value.cure


def test_a_plan_reads_as_a_list_of_its_parts() -> None:
    assert str(planned()).startswith("weights 15.0 GiB, KV cache 71.0 GiB, steps 2.0 GiB")
