"""How much host memory a node keeps KV in if its settings do not say."""

import pytest

from baton.core.memory import available_bytes, memory_limit_bytes
from baton.node.host_cache import host_cache_gib, with_host_cache
from baton.settings.node_config import GIB, HOST_CACHE_GIB_MOST, HOST_CACHE_SHARE, DecodeSettings


@pytest.mark.parametrize(
    ("memory_gib", "free_gib", "gpus", "ranks", "wanted"),
    [
        pytest.param(64, 60, 1, 1, 16.0, id="a quarter of the memory"),
        pytest.param(64, 60, 4, 1, 4.0, id="for all GPUs together"),
        pytest.param(64, 60, 4, 4, 4.0, id="each rank has a GPU"),
        pytest.param(64, 10, 1, 1, 5.0, id="half of what is free"),
        pytest.param(64, 10, 2, 2, 2.5, id="half of what is free for all ranks"),
        pytest.param(2048, 2000, 1, 1, HOST_CACHE_GIB_MOST, id="no more than page-locking allows"),
        pytest.param(16, 1, 1, 1, 0.0, id="too little"),
    ],
)
def test_host_memory_is_a_share_of_the_memory_for_each_gpu(
    memory_gib: int, free_gib: int, gpus: int, ranks: int, wanted: float
) -> None:
    size = host_cache_gib(memory_bytes=memory_gib * GIB, free_bytes=free_gib * GIB, gpus=gpus, ranks=ranks)
    assert size == wanted


def test_nodes_on_all_gpus_that_start_together_take_no_more_than_the_share() -> None:
    sizes = [host_cache_gib(memory_bytes=512 * GIB, free_bytes=500 * GIB, gpus=8, ranks=1) for _ in range(8)]
    assert sum(sizes) <= 512 * HOST_CACHE_SHARE


def test_a_size_that_is_given_stays_and_a_node_on_a_cpu_gets_none() -> None:
    assert with_host_cache(DecodeSettings(model="m", device="cpu")).host_cache_gib == 0.0
    for size in (0.0, 3.5):
        assert with_host_cache(DecodeSettings(model="m", host_cache_gib=size)).host_cache_gib == size


def test_what_is_free_is_less_than_all_memory() -> None:
    assert available_bytes() > 0
    assert memory_limit_bytes() > 0
