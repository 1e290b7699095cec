"""The number of groups in which a chunk's layers are sent."""

import pytest

from kvtransfer.layer_groups import choose_layers_per_group
from kvtransfer.link import LinkSpeed

GIB = 1 << 30
TURN_S = 50e-6
SLOW = LinkSpeed(latency_s=20e-6, message_cost_s=80e-6, bytes_per_s=10e9)


def added_s(link: LinkSpeed, chunk_bytes: int, groups: int) -> float:
    return groups * (link.message_cost_s + link.latency_s + TURN_S) + chunk_bytes / (groups * link.bytes_per_s)


@pytest.mark.parametrize("chunk_bytes", [GIB // 512, GIB // 100, GIB // 8, GIB])
@pytest.mark.parametrize("bytes_per_s", [1e9, 25e9, 400e9])
@pytest.mark.parametrize("num_layers", [1, 6, 32, 61])
def test_no_other_number_of_groups_adds_clearly_less(chunk_bytes: int, bytes_per_s: float, num_layers: int) -> None:
    link = LinkSpeed(20e-6, 80e-6, bytes_per_s)
    layers = choose_layers_per_group(link, turn_s=TURN_S, chunk_bytes=chunk_bytes, num_layers=num_layers)
    groups = -(-num_layers // layers)
    assert 1 <= groups <= num_layers
    best = min(added_s(link, chunk_bytes, other) for other in range(1, num_layers + 1))
    # Not every number of groups divides the layers evenly.
    assert added_s(link, chunk_bytes, groups) <= 1.25 * best


def test_a_small_chunk_goes_whole() -> None:
    assert choose_layers_per_group(SLOW, turn_s=TURN_S, chunk_bytes=100_000, num_layers=32) == 32
    assert choose_layers_per_group(SLOW, turn_s=TURN_S, chunk_bytes=0, num_layers=32) == 32


def test_a_large_chunk_over_a_slow_link_goes_layer_by_layer() -> None:
    assert choose_layers_per_group(SLOW, turn_s=TURN_S, chunk_bytes=4 * GIB, num_layers=16) == 1


def test_groups_that_cost_nothing_are_single_layers() -> None:
    free = LinkSpeed(latency_s=0, message_cost_s=0, bytes_per_s=1e9)
    assert choose_layers_per_group(free, turn_s=0, chunk_bytes=GIB, num_layers=8) == 1


def test_slower_turns_give_fewer_groups() -> None:
    layers = [
        choose_layers_per_group(SLOW, turn_s=turn_s, chunk_bytes=GIB // 16, num_layers=32) for turn_s in (0, 5e-3)
    ]
    assert layers[0] < layers[1]
