"""A node's status reports its steps, its blocks and its progress."""

import pytest

from baton.node.assembly import Listener, Node
from baton.node.from_settings import load
from baton.node.own_status import own_status
from baton.protos.v1 import node_status_pb2
from baton.rpc.convert_node import costs_from_proto
from tests.unit.baton.test_costs import COSTS
from tests.unit.prefill_node.nodes import prefill_settings


async def test_a_status_has_the_limits_of_a_step_and_its_costs_once_they_are_known() -> None:
    settings = prefill_settings(max_batch_tokens=48, max_batch_requests=7)
    built = load(settings)
    assert built.costs is None, "a CPU is not profiled"
    for costs in (None, COSTS):
        node = Node(settings, built._replace(costs=costs), role=node_status_pb2.ROLE_PREFILL, address="127.0.0.1:1")
        node.listen(Listener(on_step=lambda _: None, on_filled=lambda _: None, on_refused=lambda _: None))
        async with node:
            status = own_status(node, node.transfer.counters(), draining=False)
        assert (status.max_batch_tokens, status.max_batch_requests) == (48, 7)
        assert (status.backlog_s, status.decode_rows, status.context_tokens) == (0.0, 0, 0)
        assert status.HasField("step_costs") == (costs is not None)
        assert costs_from_proto(status.step_costs) == costs


@pytest.mark.parametrize(("after_s", "stuck"), [(60.0, False), (-1.0, True)])
async def test_a_status_says_whether_the_node_is_stuck(
    monkeypatch: pytest.MonkeyPatch, after_s: float, stuck: bool
) -> None:
    """Below 0, every turn of the transfer thread is too long."""
    monkeypatch.setattr("baton.node.own_status.STUCK_AFTER_S", after_s)
    settings = prefill_settings()
    node = Node(settings, load(settings), role=node_status_pb2.ROLE_PREFILL, address="127.0.0.1:1")
    node.listen(Listener(on_step=lambda _: None, on_filled=lambda _: None, on_refused=lambda _: None))
    async with node:
        status = own_status(node, node.transfer.counters(), draining=False)
    assert status.stuck == stuck
    assert list(status.blocks_open) == [status.blocks_total]
