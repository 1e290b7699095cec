"""The phases of a waterfall, read from the journals of requests that were served, retried and lost."""

from baton.core.errors import InvalidRequest, NoNode
from baton.gateway.observe.timeline import Moment, Phase, Timeline, phases, read
from baton.gateway.request.journal import FirstToken
from baton.protos.internal.v1 import decode_pb2, prefill_pb2
from tests.unit.gateway.served import LENGTH, SCHEDULED, SENT, accepted, failed, first_token, reserved, token
from tests.unit.gateway.tracing.traced import Traced

ADMITTED = decode_pb2.Admitted(bytes_received=4096, segments=2)
GONE = NoNode("connection refused")


def progress(tokens: int) -> prefill_pb2.PrefillEvent:
    return prefill_pb2.PrefillEvent(progress=prefill_pb2.PrefillProgress(computed_tokens=tokens))


def timeline_of(served: Traced) -> Timeline:
    return read(served.journal, served.machine.first_token_at_s)


def drawn(served: Traced, *, admitted_s: float | None = 0.0, queue_s: float = 0.0) -> list[Phase]:
    """The phases of a request that arrived at 0 s and ends now."""
    return list(
        phases(
            timeline_of(served),
            started_at_s=0.0,
            admitted_s=admitted_s,
            queue_s=queue_s,
            ttft_s=served.machine.first_token_at_s,
            total_s=served.now_s,
        )
    )


def hand_over(served: Traced, *, attempt: int = 1, call: int = 1) -> None:
    """From a ticket to the last token: 5 s."""
    served.decode(reserved(attempt), attempt=attempt, after_s=1.0)
    served.prefill(SCHEDULED, call=call, after_s=1.0)
    served.prefill(progress(32), call=call, after_s=1.0)
    served.prefill(first_token(), SENT, call=call, after_s=1.0)
    served.decode(ADMITTED, token(1, LENGTH), attempt=attempt, after_s=1.0)


def test_a_prompt_waits_is_computed_and_its_transfer_overlaps_both_sides_of_the_first_token() -> None:
    served = Traced()
    hand_over(served)
    assert drawn(served) == [
        ("admission", 0.0, 0.0),
        ("blocks", 0.0, 1.0),
        ("queue", 1.0, 1.25),  # as the node says, on the gateway's clock
        ("prefill", 1.25, 4.0),
        ("transfer", 3.0, 5.0),
        ("tokens", 4.0, 5.0),
    ]
    assert timeline_of(served).chunks == [(3.0, 32)]


def test_a_node_that_computes_the_prompt_itself_says_how_long_it_waited() -> None:
    served = Traced()
    served.decode(accepted(), after_s=1.0)
    served.decode(token(0), after_s=3.0)
    served.decode(token(1, LENGTH), after_s=1.0)
    assert drawn(served, queue_s=2.0) == [
        ("admission", 0.0, 0.0),
        ("queue", 0.0, 2.0),
        ("prefill", 2.0, 4.0),
        ("tokens", 4.0, 5.0),
    ]


def test_an_attempt_that_fails_before_the_first_token_is_lost_time() -> None:
    served = Traced()
    served.decode(reserved(), after_s=1.0)
    served.prefill(SCHEDULED, progress(32), after_s=1.0)
    served.handle(after_s=1.0)
    served.session_lost()
    hand_over(served, attempt=2, call=2)
    found = timeline_of(served)
    assert found.failed_at_s == [3.0]
    assert found.chunks == [(6.0, 32)]
    assert [name for name, *_ in drawn(served)] == [
        "admission", "lost", "blocks", "queue", "prefill", "transfer", "tokens",
    ]  # fmt: skip
    assert ("lost", 0.0, 3.0) in drawn(served)
    assert ("blocks", 3.0, 4.0) in drawn(served)


def test_a_call_that_fails_is_lost_time_within_its_attempt() -> None:
    served = Traced()
    served.decode(reserved(), after_s=1.0)
    served.handle(after_s=1.0)
    served.prefill_ended(GONE)
    hand_over(served, call=2)
    assert ("lost", 0.0, 3.0) in drawn(served)  # until the next call
    assert ("queue", 3.0, 3.25) in drawn(served)


def test_a_decode_node_that_takes_over_the_prompt_ends_the_lost_time() -> None:
    served = Traced(prefills=1)
    served.decode(reserved(), after_s=1.0)
    served.handle(after_s=1.0)
    served.prefill_ended(GONE)
    served.decode(accepted(), after_s=1.0)
    served.decode(token(0), after_s=1.0)
    assert drawn(served)[:3] == [("admission", 0.0, 0.0), ("lost", 0.0, 2.0), ("prefill", 2.0, 4.0)]


def test_what_happens_to_a_lost_attempt_later_is_left_out() -> None:
    served = Traced()
    served.decode(reserved(), after_s=1.0)
    served.session_lost()
    served.prefill(SCHEDULED, progress(32), SENT, after_s=1.0)
    served.decode(ADMITTED)
    assert not timeline_of(served).at_s


def test_a_failure_after_the_first_token_moves_no_moment_before_it() -> None:
    served = Traced()
    served.decode(reserved(), after_s=1.0)
    served.prefill(SCHEDULED, progress(32), after_s=1.0)
    served.prefill(first_token(), after_s=1.0)
    before = dict(timeline_of(served).at_s)
    served.handle(after_s=1.0)
    served.session_lost()
    hand_over(served, attempt=2, call=2)
    found = timeline_of(served)
    assert found.at_s == before
    assert found.failed_at_s == [4.0]
    assert Moment.ADMITTED not in found.at_s
    assert "transfer" not in [name for name, *_ in drawn(served)]


def test_a_request_that_failed_shows_how_far_it_came() -> None:
    served = Traced()
    served.decode(reserved(), after_s=1.0)
    served.prefill(SCHEDULED, after_s=1.0)
    served.decode(failed(InvalidRequest("no such token")), after_s=1.0)
    assert drawn(served)[-1] == ("prefill", 1.25, 3.0)
    assert not timeline_of(served).failed_at_s


def test_a_request_whose_turn_never_came_was_at_the_gateway_only() -> None:
    assert drawn(Traced(), admitted_s=None) == [("admission", 0.0, 0.0)]


def test_many_chunks_and_failures_leave_a_bounded_number() -> None:
    served = Traced()
    served.decode(reserved(), after_s=1.0)
    for number in range(1000):
        served.prefill(progress(number), after_s=0.001)
    found = timeline_of(served)
    assert 16 <= len(found.chunks) <= 32
    assert found.chunks[-1][1] == 999


def test_a_journal_keeps_no_memory_of_a_first_token_with_the_logprobs_of_its_prompt() -> None:
    served, event = Traced(), first_token()
    event.parts.add(bytes=4096)
    event.first_token.prompt_logprobs.add(token_id=1)
    served.decode(reserved())
    served.prefill(event)
    (mark,) = [mark for _, mark in served.journal.marks if isinstance(mark, FirstToken)]
    assert list(mark.parts) == list(event.parts)
    assert event.parts[0] is event.parts[0]  # one object for each part of a message
    assert mark.parts[0] is not event.parts[0]
