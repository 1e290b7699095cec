"""A cache in main memory has room for one longest request where memory allows; if it has not, a log line says so."""

import pytest

from baton.engine.cache_size import shortage
from baton.engine.cpu_cache import cpu_cache_bytes
from baton.kvcache.spec import KVCacheSpec, KVKind
from baton.settings.config import MIB
from baton.settings.node_config import CPU_CACHE_MIB, DecodeSettings

SPEC = KVCacheSpec(KVKind.GQA, num_layers=16, num_kv_heads=4, head_dim=128, dtype="float32")  # 64 KiB a token
GIB = 1 << 30


def settings(**values: object) -> DecodeSettings:
    return DecodeSettings.model_validate(values)


def cache_mib(context_tokens: int, memory_gib: int = 16, **values: object) -> int:
    size = cpu_cache_bytes(settings(**values), SPEC, context_tokens=context_tokens, memory_bytes=memory_gib * GIB)
    return size // MIB


def test_a_cache_in_main_memory_holds_one_longest_request() -> None:
    assert SPEC.bytes_per_token == 64 << 10
    assert cache_mib(1024) == CPU_CACHE_MIB
    assert cache_mib(4096) == 256
    assert cache_mib(4081) == 256  # whole blocks
    assert cache_mib(1 << 20, max_context_tokens=8192) == 512


def test_it_takes_at_most_a_quarter_of_the_memory_for_all_ranks() -> None:
    assert cache_mib(1 << 20) == 4096
    assert cache_mib(1 << 20, tensor_parallel_size=2) == 2048
    assert cache_mib(1 << 20, memory_gib=0) == CPU_CACHE_MIB


@pytest.mark.parametrize(
    ("given", "on_gpu", "cure"),
    [
        ({}, False, "--kv-cache-mib 256 holds it"),
        ({"kv_cache_mib": 100}, True, "--kv-cache-mib 256 holds it"),
        ({}, True, "--gpu-memory-fraction"),
    ],
)
def test_a_cache_that_is_too_small_names_the_setting_to_change(
    given: dict[str, object], on_gpu: bool, cure: str
) -> None:
    line = shortage(settings(**given), SPEC, num_blocks=64, context_tokens=4096, on_gpu=on_gpu)
    assert "holds 1024 of the 4096 tokens" in line
    assert cure in line


def test_nothing_is_told_of_a_cache_that_holds_what_is_asked_of_it() -> None:
    assert not shortage(settings(), SPEC, num_blocks=256, context_tokens=4096, on_gpu=False)
    limited = settings(max_context_tokens=1024)
    assert not shortage(limited, SPEC, num_blocks=64, context_tokens=4096, on_gpu=False)
