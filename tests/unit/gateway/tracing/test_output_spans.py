"""The spans of a request's outputs: without failures, with each kind of retry, and with reports that cannot be true."""

import pytest

from baton.core.errors import BatonError, DataLoss, NoNode
from baton.metrics.metric import Outcome
from baton.protos.internal.v1 import decode_pb2, prefill_pb2
from baton.tracing.declared import EVENTS, SPANS
from tests.unit.gateway.served import LENGTH, accepted, first_token, hand_over_failed, reserved, token
from tests.unit.gateway.tracing.traced import Exported, Traced, Traces, attributes

GONE = NoNode("connection refused")


def at(event: prefill_pb2.PrefillEvent, at_s: float, *parts: prefill_pb2.SentPart) -> prefill_pb2.PrefillEvent:
    """The event as a node reports it `at_s` after its start with the call, with the KV sent since the last one."""
    found = prefill_pb2.PrefillEvent(at_s=at_s, parts=parts)
    found.MergeFrom(event)
    return found


def scheduled(queue_s: float) -> prefill_pb2.PrefillEvent:
    return prefill_pb2.PrefillEvent(scheduled=prefill_pb2.PrefillScheduled(queue_s=queue_s))


def progress(tokens: int) -> prefill_pb2.PrefillEvent:
    return prefill_pb2.PrefillEvent(progress=prefill_pb2.PrefillProgress(computed_tokens=tokens))


def sent() -> prefill_pb2.PrefillEvent:
    return prefill_pb2.PrefillEvent(
        sent=prefill_pb2.PrefillSent(tokens_sent=64, bytes_sent=4096, segments=2, transport="tcp")
    )


def part(started_s: float, ended_s: float, start: int, stop: int) -> prefill_pb2.SentPart:
    return prefill_pb2.SentPart(
        started_s=started_s, ended_s=ended_s, token_start=start, token_stop=stop, segments=1, bytes=2048
    )


def remote(*, index: int = 0) -> Traced:
    """A request that was prefilled by p1 from 2 s to 8 s, and decoded by d1 until 12 s, each message 1 s on its way."""
    served = Traced(index=index)
    held = reserved()
    held.at_s = 0.0
    served.decode(held, after_s=2.0)  # submitted at 0, so the node began at 1; called at 2, so p1 began at 3
    served.prefill(at(scheduled(1.0), 1.0), after_s=3.0)
    served.prefill(at(progress(32), 2.0, part(1.0, 2.0, 0, 16)), after_s=1.0)
    served.prefill(at(first_token(), 3.0), after_s=1.0)
    served.prefill(at(sent(), 4.0, part(2.0, 4.0, 16, 64)), after_s=1.0)
    admitted = decode_pb2.Admitted(
        bytes_received=4096, segments=2, transfer_s=0.5, filled_s=6.25, handed_over_s=6.5, at_s=7.0
    )
    served.decode(admitted, token(1), after_s=1.0)
    served.decode(token(2, LENGTH), after_s=3.0)
    return served


def one_trace(*outputs: Traced, outcome: Outcome = Outcome.FINISHED, error: BatonError | None = None) -> Exported:
    return Traces().end(*outputs, outcome=outcome, error=error)


def test_the_times_of_nodes_are_placed_on_the_gateways_clock() -> None:
    trace = one_trace(remote())
    assert trace.times("attempt") == [(0.0, 12.0)]
    assert trace.times("decode.reserve") == [(1.0, 1.0)]
    assert trace.times("prefill") == [(3.0, 7.0)]
    assert trace.times("prefill.queue") == [(3.0, 4.0)]
    assert trace.times("prefill.chunk") == [(4.0, 5.0)]
    assert trace.times("kv.send") == [(4.0, 5.0), (5.0, 7.0)]
    assert trace.times("kv.transfer") == [(4.0, 7.25)]
    assert trace.times("decode.admit") == [(7.5, 8.0)]
    assert trace.times("decode") == [(8.0, 12.0)]


def test_every_span_is_part_of_the_one_that_the_table_says_and_names_its_process() -> None:
    trace = one_trace(remote())
    names = {span.span_id: "request" if span is trace.root else span.name for span in trace.spans}
    table = {each.name: (each.parent, each.role) for each in SPANS[1:]}
    for span in trace.spans[1:]:
        parent, role = table[span.name]
        assert names[span.parent_span_id] == parent
        assert trace.service(span)[0] == f"baton-{role}"
        declared = next(each for each in SPANS if each.name == span.name)
        assert set(attributes(span)) <= {str(name) for name in declared.attributes}
    assert set(attributes(trace.root)) <= {str(name) for name in SPANS[0].attributes}
    assert {event.name for event in trace.root.events} <= set(EVENTS)


def test_the_request_has_the_attributes_of_the_conventions() -> None:
    found = attributes(one_trace(remote()).root)
    assert (
        found.items()
        >= {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": "llama",
            "gen_ai.usage.input_tokens": 64,
            "gen_ai.usage.output_tokens": 3,
            "gen_ai.response.time_to_first_chunk": 7.0,
            "baton.outcome": "finished",
            "baton.client": "alice",
            "baton.path": "remote",
            "baton.attempts": 1,
        }.items()
    )
    assert found["gen_ai.response.finish_reasons"] == ["length"]


def test_a_lost_prefill_is_an_event_and_the_next_one_links_to_it() -> None:
    served = Traced()
    served.decode(reserved(), after_s=1.0)
    served.handle(after_s=1.0)
    served.prefill_ended(GONE)
    served.decode(reserved(lease=2), after_s=1.0)
    served.prefill(first_token(), sent(), call=2)
    served.decode(decode_pb2.Admitted(), token(1, LENGTH))
    trace = one_trace(served)
    lost, other = trace.named("prefill")
    assert lost.status.message == "connection refused"
    assert [link.span_id for link in other.links] == [lost.span_id]
    assert not other.status.message
    (retry,) = (event for event in trace.root.events if event.name == "retry")
    assert attributes(retry) == {
        "baton.retry.stage": "prefill",
        "baton.node": "node-11",
        "error.type": GONE.reason,
        "baton.retry.reason": "connection refused",
    }
    assert len(trace.named("attempt")) == 1
    assert not trace.root.status.message


def test_a_failed_hand_over_is_a_lost_prefill() -> None:
    served = Traced()
    served.decode(reserved())
    served.prefill(first_token())
    served.decode(hand_over_failed(DataLoss("digest")))
    served.decode(reserved(lease=2))
    served.prefill(first_token(1), sent(), call=2)
    served.decode(decode_pb2.Admitted(), token(2, LENGTH))
    lost, other = one_trace(served).named("prefill")
    assert lost.status.message == "digest"
    assert [link.span_id for link in other.links] == [lost.span_id]


def test_a_killed_decode_node_ends_its_attempt_and_the_next_one_links_to_it() -> None:
    served = remote_until_lost()
    served.decode(reserved(), attempt=2, after_s=1.0)
    served.prefill(first_token(2), sent(), call=2)
    served.decode(decode_pb2.Admitted(), token(3, LENGTH), attempt=2, after_s=1.0)
    trace = one_trace(served)
    lost, other = trace.named("attempt")
    assert trace.times("attempt") == [(0.0, 2.0), (2.0, 4.0)]
    assert (lost.status.message, attributes(lost)["error.type"]) == ("gone", "LOST")
    assert [link.span_id for link in other.links] == [lost.span_id]
    assert [attributes(span)["gen_ai.usage.output_tokens"] for span in trace.named("decode")] == [2, 2]
    assert [trace.service(span)[1] for span in trace.named("decode")] == ["node-21", "node-22"]
    (retry,) = (event for event in trace.root.events if event.name == "retry")
    assert attributes(retry)["baton.retry.stage"] == "decode"


def remote_until_lost() -> Traced:
    """A request whose decode node is lost at 2 s, after two tokens."""
    served = Traced()
    served.decode(reserved())
    served.prefill(first_token(), sent())
    served.decode(decode_pb2.Admitted(), token(1), after_s=1.0)
    served.handle(after_s=1.0)
    served.session_lost()
    return served


def test_a_request_that_ends_with_its_node_shows_what_there_was() -> None:
    served = Traced(decodes=1)
    served.decode(reserved())
    served.prefill(first_token(), sent())
    served.decode(decode_pb2.Admitted(), token(1), after_s=1.0)
    served.session_lost()
    trace = one_trace(served, outcome=Outcome.FAILED, error=GONE)
    assert trace.one("attempt").status.message == "gone"
    assert trace.root.status.message == "connection refused"
    assert attributes(trace.root)["error.type"] == GONE.reason
    assert attributes(trace.one("decode"))["gen_ai.usage.output_tokens"] == 2


def test_a_prompt_that_the_decode_node_prefills_has_one_prefill_there() -> None:
    served = Traced()
    served.decode(accepted(), after_s=1.0)
    first = token(0)
    first.prefill_s, first.queue_s = 2.0, 1.0
    served.decode(first, after_s=4.0)
    served.decode(token(1, LENGTH), after_s=1.0)
    trace = one_trace(served)
    assert trace.times("prefill") == [(2.0, 5.0)]
    assert trace.times("prefill.queue") == [(2.0, 3.0)]
    assert trace.times("decode") == [(5.0, 6.0)]
    assert trace.service(trace.one("prefill")) == ("baton-decode", "node-21")
    assert trace.one("prefill.queue").parent_span_id == trace.one("prefill").span_id
    assert not trace.named("kv.transfer")


def prefilled_here(*chunks: decode_pb2.ComputedChunk) -> Exported:
    """Submitted at 0, begun by the node at 1 s, computed there from 3 s to 7 s, and at the gateway 1 s later."""
    served = Traced()
    began = accepted()
    began.at_s = 0.0
    served.decode(began, after_s=2.0)
    first = token(0)
    first.prefill_s, first.queue_s = 4.0, 1.0
    first.prompt_chunks.extend(chunks)
    served.decode(first, after_s=6.0)
    served.decode(token(1, LENGTH), after_s=1.0)
    return one_trace(served)


def test_the_chunks_of_a_prompt_that_the_decode_node_prefills_are_spans_there() -> None:
    trace = prefilled_here(
        decode_pb2.ComputedChunk(ended_s=4.0, token_start=0, token_stop=32, steps=1),
        decode_pb2.ComputedChunk(ended_s=6.0, token_start=32, token_stop=64, steps=2),
    )
    prefill = trace.one("prefill")
    assert trace.times("prefill") == [(2.0, 7.0)]
    assert trace.times("prefill.chunk") == [(3.0, 5.0), (5.0, 7.0)]
    assert trace.times("decode") == [(7.0, 9.0)]
    one, other = trace.named("prefill.chunk")
    assert attributes(one) == {"baton.token.start": 0, "baton.token.stop": 32}
    assert attributes(other) == {"baton.token.start": 32, "baton.token.stop": 64, "baton.merged": 2}
    assert {span.parent_span_id for span in (one, other)} == {prefill.span_id}
    assert trace.service(one) == ("baton-decode", "node-21")


def test_impossible_chunks_of_a_decode_node_stay_within_the_request() -> None:
    chunks = [decode_pb2.ComputedChunk(ended_s=each, token_stop=5) for each in (float("nan"), 1e300, -1e300)] * 1000
    trace = prefilled_here(*chunks)
    assert len(trace.named("prefill.chunk")) <= 32
    assert all(0.0 <= start <= end <= 9.0 for span in trace.spans for start, end in trace.times(span.name))


def test_a_split_prompt_has_a_prefill_on_either_node_and_no_retry() -> None:
    served = Traced()
    asked = reserved()
    asked.ticket.token_stop, asked.ticket.first_part = 32, True
    served.decode(asked)
    served.prefill(scheduled(0.0), sent(), after_s=1.0)
    served.prefill_ended(None)
    first = token(0)
    first.prefill_s, first.queue_s = 1.0, 0.5
    served.decode(decode_pb2.Admitted(), first, token(1, LENGTH), after_s=3.0)
    trace = one_trace(served)
    first_part, rest = sorted(trace.named("prefill"), key=lambda span: span.start_time_unix_nano)
    assert [trace.service(span)[1] for span in (first_part, rest)] == ["node-11", "node-21"]
    assert attributes(first_part)["baton.token.stop"] == 32
    assert (2.5, 4.0) in trace.times("prefill")  # with its wait
    assert attributes(trace.root)["baton.path"] == "split"
    assert "retry" not in [event.name for event in trace.root.events]
    assert not any(span.status.message for span in trace.spans)


def test_several_outputs_are_attempts_of_one_request() -> None:
    trace = one_trace(remote(), remote(index=1))
    assert [attributes(span)["baton.output.index"] for span in trace.named("attempt")] == [0, 1]
    found = attributes(trace.root)
    assert (found["gen_ai.request.choice.count"], found["gen_ai.usage.output_tokens"]) == (2, 6)
    assert found["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert [event.name for event in trace.root.events] == ["first token"]
    assert len({span.span_id for span in trace.spans}) == len(trace.spans)


def test_a_long_prompts_chunks_are_merged() -> None:
    served = Traced()
    served.decode(reserved())
    served.prefill(scheduled(0.0))
    for number in range(100):
        served.prefill(progress(number + 1), after_s=0.5)
    served.prefill(first_token(), sent())
    served.decode(decode_pb2.Admitted(), token(1, LENGTH))
    chunks = one_trace(served).named("prefill.chunk")
    assert len(chunks) <= 32
    assert sum(int(str(attributes(chunk).get("baton.merged", 1))) for chunk in chunks) == 100
    assert attributes(chunks[-1])["baton.token.stop"] == 100


def test_what_no_trace_has_room_for_is_counted() -> None:
    served = remote()
    for _ in range(3000):
        served.prefill(progress(1))
    assert len(served.journal.marks) == 2048
    assert attributes(one_trace(served).root)["baton.trace.events_dropped"] == served.journal.dropped > 900


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf"), -1e9, 1e300])
def test_a_node_whose_reports_cannot_be_true_moves_no_span_out_of_its_request(wrong: float) -> None:
    served = Traced()
    held = reserved()
    held.at_s = held.queue_s = wrong
    served.decode(held, after_s=1.0)
    served.prefill(at(scheduled(wrong), wrong), at(progress(32), wrong, part(wrong, wrong, 0, 16)), after_s=1.0)
    huge = prefill_pb2.PrefillSent(bytes_sent=2**64 - 1, segments=2**32 - 1)
    served.prefill(at(first_token(), wrong), at(prefill_pb2.PrefillEvent(sent=huge), wrong), after_s=1.0)
    admitted = decode_pb2.Admitted(
        bytes_received=2**64 - 1, transfer_s=wrong, at_s=wrong, filled_s=wrong, handed_over_s=wrong
    )
    served.decode(admitted, token(1, LENGTH), after_s=1.0)
    trace = one_trace(served)
    for name in {span.name for span in trace.spans[1:]}:
        for start_s, end_s in trace.times(name):
            assert 0.0 <= start_s <= end_s <= 4.0
