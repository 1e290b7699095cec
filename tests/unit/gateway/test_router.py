"""A request goes to the least loaded of the nodes that can take it."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from baton.core.types import LocalPolicy
from baton.gateway.fleet.node_view import NodeView
from baton.gateway.fleet.router import RoutedRequest, pick_decode, pick_prefill

REVISION = "ours"


def node(number: int, **changes: object) -> NodeView:
    view = NodeView(
        address=f"node-{number}",
        incarnation=number,
        revision=REVISION,
        open=True,
        max_context_tokens=1000,
        block_size=16,
        room_tokens=1600,
        requests=0,
        tokens_waiting=0,
        ready_peers=frozenset(),
    )
    return replace(view, **changes)  # type: ignore[arg-type]


def prefill(number: int, *peers: int, **changes: object) -> NodeView:
    return node(number, ready_peers=frozenset(peers), **changes)


def wanted(policy: LocalPolicy = LocalPolicy.PREFER, **changes: object) -> RoutedRequest:
    return replace(RoutedRequest(num_tokens=100, policy=policy), **changes)  # type: ignore[arg-type]


def address(picked: NodeView | None) -> str | None:
    return None if picked is None else picked.address


def test_the_least_loaded_decode_node_is_picked() -> None:
    assert address(pick_decode([node(1, requests=3), node(2, requests=2)], [], wanted())) == "node-2"


def test_requests_sent_since_the_report_count() -> None:
    assert address(pick_decode([node(1, requests_since=3), node(2, requests=2)], [], wanted())) == "node-2"


def test_idle_nodes_take_turns() -> None:
    assert address(pick_decode([node(1, turn=1), node(2)], [], wanted())) == "node-2"


def test_room_comes_before_load() -> None:
    full, busy = node(1, room_tokens=96), node(2, requests=9)
    assert address(pick_decode([full, busy], [], wanted())) == "node-2"
    assert address(pick_decode([full], [], wanted())) == "node-1"  # it may queue there


def test_a_paired_decode_node_is_preferred() -> None:
    decodes = [node(1), node(2, requests=5)]
    assert address(pick_decode(decodes, [prefill(9, 2)], wanted())) == "node-2"
    assert address(pick_decode(decodes, [prefill(9, 2)], wanted(LocalPolicy.LOCAL))) == "node-1"


def test_strict_takes_only_paired_nodes() -> None:
    assert pick_decode([node(1)], [prefill(9, 2)], wanted(LocalPolicy.STRICT)) is None
    assert address(pick_decode([node(1), node(2)], [prefill(9, 2)], wanted(LocalPolicy.STRICT))) == "node-2"
    assert pick_decode([node(2)], [prefill(9, 2, open=False)], wanted(LocalPolicy.STRICT)) is None


def test_closed_small_excluded_and_foreign_nodes_are_out() -> None:
    out = [node(1, open=False), node(2, max_context_tokens=100), node(3), node(4, revision="other")]
    request = wanted(excluded_decode=frozenset([3]), revision=REVISION)
    assert pick_decode(out, [], request) is None


def test_the_prefill_node_with_the_least_to_compute_is_picked() -> None:
    prefills = [prefill(1, 9, tokens_waiting=500), prefill(2, 9, tokens_waiting=100, tokens_since=300), prefill(3, 8)]
    assert address(pick_prefill(prefills, node(9), wanted())) == "node-2"
    assert address(pick_prefill(prefills, node(9), wanted(excluded_prefill=frozenset([2])))) == "node-1"
    assert pick_prefill(prefills, node(9), wanted(excluded_prefill=frozenset([1, 2]))) is None


views = st.builds(
    node,
    st.integers(1, 6),
    open=st.booleans(),
    max_context_tokens=st.sampled_from([50, 1000]),
    room_tokens=st.integers(0, 320),
    requests=st.integers(0, 3),
    revision=st.sampled_from([REVISION, "other"]),
    ready_peers=st.frozensets(st.integers(1, 6)),
)


@given(
    st.lists(views, max_size=5),
    st.lists(views, max_size=5),
    st.sampled_from(LocalPolicy),
    st.sampled_from(["", REVISION]),
)
def test_a_pick_is_always_usable(
    decodes: Sequence[NodeView], prefills: Sequence[NodeView], policy: LocalPolicy, revision: str
) -> None:
    request = wanted(policy, revision=revision, excluded_decode=frozenset([1]), excluded_prefill=frozenset([2]))
    decode = pick_decode(decodes, prefills, request)
    if decode is None:
        return
    assert decode.open
    assert decode.max_context_tokens > request.num_tokens
    assert decode.incarnation != 1
    assert revision in ("", decode.revision)
    partner = pick_prefill(prefills, decode, request)
    if partner is None:
        assert policy is not LocalPolicy.STRICT
    else:
        assert partner.open
        assert decode.incarnation in partner.ready_peers
        assert partner.incarnation != 2
