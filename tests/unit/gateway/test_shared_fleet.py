"""Processes of one gateway know what the others have sent to nodes since their last status, and nodes of sessions."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from baton.core.types import LocalPolicy
from baton.gateway.core.shared_sends import NOTHING, SentWork, SharedSends
from baton.gateway.core.shared_sessions import SharedSessions
from baton.gateway.fleet.fleet import Fleet
from baton.gateway.fleet.router import RoutedRequest
from tests.unit.gateway.fleets import DECODE, MODEL, PREFILL, decoding_node, peer, status


@dataclass(frozen=True)
class Memory:
    """Descriptors of what two workers share."""

    sends: int
    sessions: int


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory(SharedSends.create(2), SharedSessions.create())
    yield memory
    os.close(memory.sends)
    os.close(memory.sessions)


def report(fleet: Fleet) -> None:
    """All nodes send a status: prefill nodes p1 and p2, decode nodes d1 and d2, all idle and paired."""
    for number in (1, 2):
        fleet.status_received(PREFILL, f"p{number}", status(PREFILL, 10 + number, peer(21), peer(22)), 0.0)
        if f"d{number}" in fleet.decodes:
            fleet.status_received(DECODE, f"d{number}", status(DECODE, 20 + number), 0.0)


def worker(row: int, memory: Memory) -> Fleet:
    fleet = Fleet(MODEL, 1000, LocalPolicy.STRICT)
    fleet.share(SharedSends(2, row, memory.sends), SharedSessions(memory.sessions))
    for number in (1, 2):
        fleet.add(PREFILL, f"p{number}")
        fleet.add(DECODE, f"d{number}")
    report(fleet)
    return fleet


def send(fleet: Fleet, tokens: int = 160) -> str:
    """Chooses a node for a request, sends it there, and returns the node's address."""
    node = decoding_node(fleet, RoutedRequest(tokens, LocalPolicy.STRICT))
    assert node is not None
    node.note_sent(tokens)
    return node.address


def test_two_workers_do_not_choose_the_same_idle_node(memory: Memory) -> None:
    one, other = worker(0, memory), worker(1, memory)
    chosen = [send(fleet) for fleet in (one, other, one, other, other, one)]
    assert chosen.count("d1") == chosen.count("d2") == 3
    assert chosen[0] != chosen[1]


def test_the_room_and_the_backlog_of_a_node_are_those_that_all_workers_leave(memory: Memory) -> None:
    one, other = worker(0, memory), worker(1, memory)
    for _ in range(2):
        one.decodes["d1"].note_sent(160)
    view, own = other.decodes["d1"].view(), one.decodes["d1"].view()
    assert (view.requests_since, view.tokens_since, view.room_tokens) == (2, 320, own.room_tokens)
    one.prefills["p1"].note_prompt(0, 160, 0.0)
    other.prefills["p1"].view()
    assert other.prefills["p1"].queue_s(0.0) == pytest.approx(one.prefills["p1"].queue_s(0.0))


def test_a_status_contains_what_others_had_sent_before_it(memory: Memory) -> None:
    one, other = worker(0, memory), worker(1, memory)
    one.decodes["d1"].note_sent(160)
    report(other)
    assert other.decodes["d1"].view().requests_since == 0
    one.decodes["d1"].note_sent(160)
    assert other.decodes["d1"].view().requests_since == 1


def test_a_worker_that_starts_later_counts_nothing_that_was_sent_before(memory: Memory) -> None:
    one = worker(0, memory)
    one.decodes["d1"].note_sent(160)
    assert worker(1, memory).decodes["d1"].view().requests_since == 0


def test_nodes_and_roles_have_numbers_of_their_own_until_the_room_is_used_up(memory: Memory) -> None:
    one, other = (SharedSends(2, row, memory.sends) for row in range(2))
    for number in range(1000):
        sends = one.of(DECODE, f"node-{number}")
        assert sends is not None
        sends.add_request(number)
    for number in range(1000):
        found, prefill = other.of(DECODE, f"node-{number}"), other.of(PREFILL, f"node-{number}")
        assert found is not None
        assert prefill is not None
        assert (found.by_others(), prefill.by_others()) == (SentWork(1, number, 0), NOTHING)
    assert any(other.of(DECODE, f"more-{number}") is None for number in range(1 << 16))


# ---- what hand-overs teach


def test_a_hand_over_teaches_all_workers_and_a_restarted_node_is_learned_anew(memory: Memory) -> None:
    one, other = worker(0, memory), worker(1, memory)
    one.decodes["d1"].second_token.add(0.02, 0.0)
    other.decodes["d1"].second_token.add(0.015, 0.0)
    assert [fleet.decodes["d1"].second_token.at(0.0) for fleet in (one, other)] == [0.015, 0.015]
    assert other.decodes["d2"].second_token.at(0.0) == 0.0
    assert worker(0, memory).decodes["d1"].second_token.at(0.0) == 0.015, "a worker that starts later"
    one.status_received(DECODE, "d1", status(DECODE, 121), 1.0)
    one.decodes["d1"].second_token.add(0.03, 1.0)
    other.status_received(DECODE, "d1", status(DECODE, 121), 2.0)
    assert other.decodes["d1"].second_token.at(1.0) == 0.03


# ---- sessions


def place(fleet: Fleet, session: str) -> str:
    """The decode node of a session's next request."""
    node = decoding_node(fleet, RoutedRequest(160, LocalPolicy.STRICT, session_id=session))
    assert node is not None
    node.note_sent(160)
    report(fleet)
    return node.address


def test_a_session_stays_on_its_nodes_whichever_worker_serves_it(memory: Memory) -> None:
    one, other = worker(0, memory), worker(1, memory)
    sessions = [f"session {number}" for number in range(40)]
    first = [place(one, session) for session in sessions]
    assert set(first) == {"d1", "d2"}
    report(other)
    assert [place(other, session) for session in sessions] == first


def test_nodes_that_are_gone_do_not_count(memory: Memory) -> None:
    one, other = worker(0, memory), worker(1, memory)
    first = place(one, "session")
    other.remove(DECODE, first, 0.0)
    assert place(other, "session") != first


def test_the_sessions_that_were_used_last_are_kept(memory: Memory) -> None:
    one, other = (SharedSessions(memory.sessions) for _ in range(2))
    for number in range(100_000):  # many more than entries
        one.note(f"old {number}", 1, 7)
    for number in range(10_000):
        one.note(f"new {number}", 0, number + 1)
        other.note(f"new {number}", 1, -number - 1)
    kept = [number for number in range(10_000) if other.nodes(f"new {number}") == (number + 1, -number - 1)]
    assert len(kept) > 9_990
    assert one.nodes("unknown") == ()
