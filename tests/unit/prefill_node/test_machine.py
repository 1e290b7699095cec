"""Which calls an event concerns, and when calls are refused."""

from baton.core.errors import Cancelled, Draining, NoNode
from prefill_node.commands import EndCall, SendKV, StopSending, Submit
from prefill_node.events import Aborted, BecameQuiet, CallCancelled, Closing, DrainStarted, LeaseEnded, PeerLost, Sent
from tests.unit.prefill_node.calls import (
    OTHER_PEER,
    PEER,
    called,
    chunk,
    machine,
    play,
    sampled,
    segments_of,
    started,
    step,
    ticket,
)


def test_a_steps_events_reach_their_calls() -> None:
    node = machine()
    play(node, called(1, ticket(5)), called(2, ticket(6)))
    commands = play(node, step(chunk(4, 2), chunk(8, 1), chunk(8, 3)))
    jobs = [command.job for command in commands if isinstance(command, SendKV)]
    assert [(job.lease, job.token_stop) for job in jobs] == [(6, 4), (5, 8)]


def test_a_step_in_which_a_prompt_starts_and_ends_is_reported_in_order() -> None:
    commands = play(machine(), called(), step(sampled(), chunk(8), started()))
    kinds = [command.event.WhichOneof("event") for command in commands if hasattr(command, "event")]
    assert kinds == ["scheduled", "progress", "first_token"]


def test_a_lease_that_ended_at_one_decode_node_leaves_the_same_number_at_another_alone() -> None:
    node = machine()
    play(node, called(1, ticket(5), peer=PEER), called(2, ticket(5), peer=OTHER_PEER), called(3, ticket(6), peer=PEER))
    assert play(node, LeaseEnded(OTHER_PEER.number, 5)) == [StopSending(2, OTHER_PEER.number, 5)]


def test_a_lost_decode_node_fails_its_own_calls() -> None:
    node = machine()
    play(node, called(1, ticket(5), peer=PEER), called(2, ticket(5), peer=OTHER_PEER), called(3, ticket(6), peer=PEER))
    assert play(node, PeerLost(PEER.number, NoNode("gone"))) == [
        StopSending(1, PEER.number, 5),
        StopSending(3, PEER.number, 6),
    ]


def test_a_cancelled_call_leaves_the_others_alone() -> None:
    node = machine()
    play(node, called(1, ticket(5)), called(2, ticket(6)))
    assert play(node, CallCancelled(2)) == [StopSending(2, PEER.number, 6)]
    (end,) = play(node, BecameQuiet(2), Aborted(2))[2:]
    assert isinstance(end, EndCall)
    assert isinstance(end.error, Cancelled)
    assert node.busy


def test_a_draining_node_refuses_new_calls_and_completes_those_that_run() -> None:
    node = machine()
    play(node, called(1))
    assert node.refusal() is None
    assert play(node, DrainStarted()) == []
    assert isinstance(node.refusal(), Draining)

    (end,) = play(node, called(2, ticket(6)))
    assert isinstance(end, EndCall)
    assert isinstance(end.error, Draining)

    (send,) = (command for command in play(node, step(chunk(8), sampled())) if isinstance(command, SendKV))
    assert play(node, Sent(1, segments_of(send.job)), Aborted(1))[-1] == EndCall(1, None)
    assert not node.busy


def test_a_node_that_closes_fails_every_call_and_takes_no_other() -> None:
    node = machine()
    play(node, called(1, ticket(5)), called(2, ticket(6)))
    assert play(node, Closing()) == [StopSending(1, PEER.number, 5), StopSending(2, PEER.number, 6)]
    (end,) = play(node, called(3, ticket(7)))
    assert isinstance(end, EndCall)
    assert isinstance(end.error, Draining)


def test_events_of_unknown_calls_are_ignored() -> None:
    node = machine()
    assert play(node, CallCancelled(1), BecameQuiet(1), Aborted(1), Sent(1, ()), step(chunk(8))) == []
    assert [type(command) for command in play(node, called(1))] == [Submit]
