"""A call whose prompt may be in stores outside of the cache: it is looked for there before it is computed."""

from prefill_node.commands import EndCall, Prefetch, StopSending, Submit
from prefill_node.events import Aborted, BecameQuiet, CallCancelled, Prefetched
from tests.unit.prefill_node.calls import PEER, called, chunk, machine, play, step


def test_a_prompt_is_computed_after_it_was_looked_for() -> None:
    node = machine(prefetches=True)
    (prefetch,) = play(node, called(1))
    assert isinstance(prefetch, Prefetch)
    assert play(node, Prefetched(1)) == [Submit(prefetch.request)]
    assert play(node, step(chunk(8, 1)))


def test_a_call_that_was_cancelled_meanwhile_is_never_submitted() -> None:
    node = machine(prefetches=True)
    play(node, called(1))
    assert play(node, CallCancelled(1)) == [StopSending(1, PEER.number, 5)]
    assert play(node, Prefetched(1)) == []
    assert isinstance(play(node, BecameQuiet(1), Aborted(1))[-1], EndCall)
    assert play(node, Prefetched(1)) == []
    assert not node.busy


def test_calls_do_not_wait_for_each_other() -> None:
    node = machine(prefetches=True)
    play(node, called(1), called(2))
    (submit,) = play(node, Prefetched(2))
    assert isinstance(submit, Submit)
    assert submit.request.request_id == "2"
