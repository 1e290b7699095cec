"""Flows between nodes of several ranks: every rank gets its share once, from ranks that hold it, evenly."""

from collections import Counter

import pytest

from baton.core.errors import ConfigError
from kvtransfer.flows import Flow, RankPair, flows, heads_of

LAYERS = 8


@pytest.mark.parametrize("receivers", [1, 2, 4, 8])
@pytest.mark.parametrize("senders", [1, 2, 4, 8])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
def test_every_rank_gets_every_layer_of_its_heads_once(num_kv_heads: int, senders: int, receivers: int) -> None:
    found = flows(num_layers=LAYERS, num_kv_heads=num_kv_heads, senders=senders, receivers=receivers)
    got: Counter[tuple[int, int, int]] = Counter()
    sent: Counter[int] = Counter()
    for link, flow in found.items():
        held = heads_of(link.sender_rank, ranks=senders, num_kv_heads=num_kv_heads)
        assert set(flow.heads) <= set(held)
        got.update((link.receiver_rank, layer, head) for layer in flow.layers for head in flow.heads)
        sent[link.sender_rank] += len(flow.layers) * len(flow.heads)
    assert got == Counter(
        (rank, layer, head)
        for rank in range(receivers)
        for layer in range(LAYERS)
        for head in heads_of(rank, ranks=receivers, num_kv_heads=num_kv_heads)
    )
    assert len(set(sent.values())) == 1
    assert len(sent) == senders


def test_all_heads_are_held_and_as_often_each() -> None:
    for num_kv_heads, ranks in ((8, 2), (2, 8), (1, 4), (6, 3)):
        held = Counter(head for rank in range(ranks) for head in heads_of(rank, ranks=ranks, num_kv_heads=num_kv_heads))
        assert held == dict.fromkeys(range(num_kv_heads), max(1, ranks // num_kv_heads))


def test_latents_on_two_ranks_come_half_from_each_of_two_senders() -> None:
    first, second = Flow(range(4), range(1)), Flow(range(4, 8), range(1))
    assert flows(num_layers=LAYERS, num_kv_heads=1, senders=2, receivers=2) == {
        RankPair(0, 0): first,
        RankPair(1, 0): second,
        RankPair(1, 1): first,
        RankPair(0, 1): second,
    }


def test_fewer_layers_than_senders_leave_some_without_work() -> None:
    found = flows(num_layers=1, num_kv_heads=1, senders=4, receivers=1)
    assert list(found.values()) == [Flow(range(1), range(1))]


@pytest.mark.parametrize(("ranks", "num_kv_heads"), [(3, 8), (4, 6)])
def test_ranks_that_do_not_divide_the_heads_are_refused(ranks: int, num_kv_heads: int) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        heads_of(0, ranks=ranks, num_kv_heads=num_kv_heads)
