"""A node's report of its experts' load: totals since the start, and the imbalance of the last seconds with traffic."""

from collections.abc import Mapping

import pytest

from baton.core.errors import InvalidRequest
from baton.core.expert_load import ExpertLoad, LayerLoad
from baton.metrics.exposition import by_series
from baton.models.config.expert_places import place_experts
from baton.node.expert_load import ExpertLoads
from baton.rpc.convert_node import expert_load_from_proto

PLAN = place_experts((False, True, True), 4, ranks=2)  # experts 0 and 1 on rank 0, 2 and 3 on rank 1


class Device:
    """The counters, as a test sets them."""

    def __init__(self) -> None:
        self.counts: Mapping[int, tuple[int, ...]] = {1: (0, 0, 0, 0), 2: (0, 0, 0, 0)}

    async def read(self) -> Mapping[int, tuple[int, ...]]:
        return self.counts


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def loads(device: Device) -> ExpertLoads:
    return ExpertLoads(PLAN, device.read, model="mixture", ranks=2)


async def test_the_imbalance_is_of_what_came_since_the_last_read(device: Device, loads: ExpertLoads) -> None:
    device.counts = {1: (1, 1, 1, 1), 2: (4, 0, 0, 0)}
    await loads.read()
    summary = loads.summary()
    assert summary is not None
    assert (summary.imbalance_mean, summary.imbalance_max) == (1.5, 2.0)
    device.counts = {1: (2, 1, 5, 1), 2: (5, 0, 0, 1)}
    await loads.read()
    summary = loads.summary()
    assert summary is not None
    assert list(summary.rank_tokens) == [8, 7], "totals are since the start"
    assert (summary.imbalance_mean, summary.imbalance_max) == pytest.approx(((1.6 + 1.0) / 2, 1.6))


async def test_an_idle_node_keeps_its_last_imbalance(device: Device, loads: ExpertLoads) -> None:
    device.counts = {1: (1, 1, 1, 1), 2: (4, 0, 0, 0)}
    await loads.read()
    before = loads.summary()
    await loads.read()
    assert loads.summary() == before


async def test_the_table_has_every_expert_and_rank(device: Device, loads: ExpertLoads) -> None:
    device.counts = {1: (1, 2, 3, 4), 2: (0, 0, 0, 9)}
    expected = ExpertLoad(
        model="mixture",
        layers=(
            LayerLoad(layer=1, tokens=(1, 2, 3, 4), rank_tokens=(3, 7)),
            LayerLoad(layer=2, tokens=(0, 0, 0, 9), rank_tokens=(0, 9)),
        ),
    )
    assert await loads.load() == expected
    assert expert_load_from_proto(await loads.message()) == expected


async def test_metrics_are_those_of_the_status(device: Device, loads: ExpertLoads) -> None:
    assert set(by_series(loads.figures()).values()) == {0.0}, "before the first token"
    device.counts = {1: (1, 2, 3, 4), 2: (0, 0, 0, 9)}
    await loads.read()
    assert by_series(loads.figures()) == {
        ("baton_expert_imbalance", ("mean",)): pytest.approx((1.4 + 2.0) / 2),
        ("baton_expert_imbalance", ("max",)): 2.0,
        ("baton_expert_tokens_total", ("0",)): 3,
        ("baton_expert_tokens_total", ("1",)): 16,
    }


async def test_where_nothing_is_counted_the_table_is_refused(device: Device) -> None:
    loads = ExpertLoads(None, device.read, model="dense", ranks=1)
    await loads.watch()
    assert loads.summary() is None
    assert set(by_series(loads.figures()).values()) == {0}
    with pytest.raises(InvalidRequest, match="does not count the tokens of experts"):
        await loads.load()
