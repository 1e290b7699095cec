"""`baton status` shows lost nodes, and their pairs, as lost."""

import io

from rich.console import Console

from baton.cli.status_tables import render
from baton.protos.v1 import node_status_pb2, operations_pb2


def _shown(*nodes: operations_pb2.NodeReport) -> list[list[str]]:
    """The words of each line."""
    written = io.StringIO()
    Console(file=written, width=100).print(render(operations_pb2.ClusterStatusResponse(nodes=nodes)))
    return [line.split() for line in written.getvalue().splitlines()]


def _pair(*, decode_is_there: bool) -> tuple[operations_pb2.NodeReport, operations_pb2.NodeReport]:
    peer = node_status_pb2.PeerState(
        name="decode-0", incarnation=7, phase=node_status_pb2.PEER_PHASE_READY, transport="tcp"
    )
    prefill = node_status_pb2.NodeStatus(
        info=node_status_pb2.NodeInfo(name="prefill-0", role=node_status_pb2.ROLE_PREFILL, incarnation=5), peers=[peer]
    )
    decode = node_status_pb2.NodeStatus(
        info=node_status_pb2.NodeInfo(name="decode-0", role=node_status_pb2.ROLE_DECODE, incarnation=7)
    )
    return (
        operations_pb2.NodeReport(address="a:1", reachable=True, status=prefill),
        operations_pb2.NodeReport(address="a:2", reachable=decode_is_there, status=decode),
    )


def _state_of_the_pair(lines: list[list[str]]) -> str:
    return next(words[2] for words in lines if words[:2] == ["prefill-0", "decode-0"])


def test_a_pair_is_ready_while_both_ends_are_there() -> None:
    assert _state_of_the_pair(_shown(*_pair(decode_is_there=True))) == "ready"


def test_a_pair_with_a_lost_end_is_lost_whatever_its_other_end_last_said() -> None:
    assert _state_of_the_pair(_shown(*_pair(decode_is_there=False))) == "lost"


def test_a_node_that_was_never_reached_is_unreachable_not_lost() -> None:
    lines = _shown(operations_pb2.NodeReport(address="a:1", reachable=False, detail="Connection refused"))
    assert ["a:1", "unknown", "unreachable", "0", "0", "0/0", "a:1"] in lines
