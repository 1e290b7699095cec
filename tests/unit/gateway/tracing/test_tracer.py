"""Which requests' traces leave the gateway, and as part of whose trace."""

import pytest

from baton.core.errors import Cancelled, DeadlineExceeded, InvalidRequest, NoNode
from baton.core.types import NO_SLO, Slo
from baton.gateway.core import events
from baton.gateway.observe.tracing.tracer import Ending
from baton.gateway.request.pooling import PooledBatch
from baton.gateway.request.receipt import Retry
from baton.metrics.metric import Outcome
from baton.protos.internal.v1 import decode_pb2, prefill_pb2
from baton.tracing.context import TraceContext, read_context
from tests.unit.gateway.served import LENGTH, SCHEDULED, SENT, first_token, reserved, token
from tests.unit.gateway.tracing.traced import Exported, Traced, Traces, attributes

TRACE_ID, SPAN_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331


def served(*, retried: bool = False, first_after_s: float = 0.0, slo: Slo = NO_SLO) -> Traced:
    request, call = Traced(slo=slo), 1
    request.decode(reserved())
    if retried:
        request.prefill_ended(NoNode("connection refused"))
        request.decode(reserved(lease=2))
        call = 2
    request.prefill(first_token(), SENT, call=call, after_s=first_after_s)
    request.decode(decode_pb2.Admitted(), token(1, LENGTH), after_s=1.0)
    return request


def test_a_request_that_is_not_sampled_leaves_nothing() -> None:
    traces = Traces(ratio=0.0)
    assert traces.end(served(slo=Slo(2.0, 2.0))).spans == []
    assert traces.end(served(), outcome=Outcome.CANCELLED, error=Cancelled("the client disconnected")).spans == []


@pytest.mark.parametrize("error", [NoNode("gone"), DeadlineExceeded("late")])
def test_a_failed_request_is_exported_with_its_error(error: NoNode | DeadlineExceeded) -> None:
    outcome = Outcome.DEADLINE if isinstance(error, DeadlineExceeded) else Outcome.FAILED
    root = Traces(ratio=0.0).end(served(), outcome=outcome, error=error).root
    assert attributes(root).items() >= {"baton.trace.kept_for": "failed", "error.type": error.reason}.items()
    assert root.status.message == str(error)


def test_a_request_that_failed_before_any_node_is_exported() -> None:
    trace = Traces(ratio=0.0).end(outcome=Outcome.FAILED, error=NoNode("no node is there"))
    assert [span.name for span in trace.spans] == ["chat llama", "prepare", "queue"]


@pytest.mark.parametrize("slo", [Slo(ttft_s=2.0), Slo(tpot_s=0.5)])
def test_a_request_that_missed_its_ttft_or_tpot_is_exported(slo: Slo) -> None:
    """Its first token comes after 3 s, its second one 1 s later."""
    trace = Traces(ratio=0.0).end(served(first_after_s=3.0, slo=slo))
    assert attributes(trace.root)["baton.trace.kept_for"] == "slow"


def test_a_retried_request_is_exported() -> None:
    trace = Traces(ratio=0.0).end(served(retried=True))
    assert attributes(trace.root)["baton.trace.kept_for"] == "retried"


def test_a_cancelled_request_is_no_error_and_shows_how_far_it_came() -> None:
    request = Traced()
    request.decode(reserved())
    request.prefill(SCHEDULED)
    error = Cancelled("the client disconnected")
    request.handle(events.ClientCancelled(error), after_s=1.0)
    trace = Traces().end(request, outcome=Outcome.CANCELLED, error=error)
    assert attributes(trace.root)["baton.outcome"] == "cancelled"
    assert "error.type" not in attributes(trace.root)
    assert not any(span.status.message for span in trace.spans)
    assert trace.times("prefill") == [(0.0, 1.0)]


@pytest.mark.parametrize("sampled", [False, True])
def test_a_request_goes_on_with_its_callers_trace(sampled: bool) -> None:
    traces = Traces(ratio=0.0 if sampled else 1.0)
    parent = TraceContext(TRACE_ID, SPAN_ID, sampled, "a=b")
    trace = traces.end(served(), parent=parent)
    assert bool(trace.spans) is sampled
    for span in trace.spans:
        assert (int.from_bytes(span.trace_id), span.trace_state) == (TRACE_ID, "a=b")
    if sampled:
        assert int.from_bytes(trace.root.parent_span_id) == SPAN_ID


def test_nodes_get_the_requests_span_as_their_parent() -> None:
    tracer = Traces().tracer
    trace = tracer.begin("mine", TraceContext(TRACE_ID, SPAN_ID, sampled=False), 0.0)
    context = read_context(trace.traceparent)
    assert context is not None
    assert (context.trace_id, context.sampled) == (TRACE_ID, False)
    assert context.span_id != SPAN_ID


def test_a_wrong_requests_trace_shows_its_field_and_not_what_the_client_sent() -> None:
    traces = Traces()
    error = InvalidRequest("the prompt is 'secret'", field="prompt", value="secret")
    root = traces.end(outcome=Outcome.CLIENT_ERROR, error=error).root
    assert root.status.message.endswith("in prompt")
    assert b"secret" not in b"".join(traces.exported)


def test_a_huge_model_name_is_cut() -> None:
    traces = Traces()
    trace = traces.tracer.begin("mine", None, 0.0)
    trace.note_request("x" * 1_000_000, "text_completion")
    trace.end(Ending(Outcome.CLIENT_ERROR, None, ""), 1.0)
    assert len(b"".join(traces.exported)) < 5000


def test_the_first_output_describes_a_request_whichever_output_ends_first() -> None:
    first, second = Traced(index=0), Traced(index=1)
    for output, cached in ((first, 16), (second, 48)):
        output.decode(reserved())
        scheduled = prefill_pb2.PrefillScheduled(cached_tokens=cached)
        output.prefill(prefill_pb2.PrefillEvent(scheduled=scheduled), first_token(), SENT)
        output.decode(decode_pb2.Admitted(), token(1, LENGTH))
    trace = Traces().end(second, first)
    assert attributes(trace.root)["gen_ai.usage.cache_read.input_tokens"] == 16


def batch(node: str, *retries: Retry, called_s: float) -> PooledBatch:
    """A batch of 40 tokens, 8 of them cached, that took half a second."""
    pooled = [prefill_pb2.PooledPrompt(cached_tokens=8), prefill_pb2.PooledPrompt()]
    return PooledBatch(
        prefill_pb2.PoolResponse(pooled=pooled, queue_s=0.25, pool_s=0.125),
        prompt_tokens=40,
        node=node,
        address=f"{node}:7001",
        version="",
        revision="",
        revision_name="",
        attempts=1 + len(retries),
        called_s=called_s,
        ended_s=called_s + 0.5,
        total_s=0.5,
        retries=retries,
        failures="",
    )


def test_each_batch_of_pooled_prompts_is_a_span_and_a_lost_attempt_an_event() -> None:
    traces = Traces(ratio=0.0)
    trace = traces.tracer.begin("mine", None, 0.0, "rerank-1")
    trace.note_request("", "embeddings")
    trace.prepared(None, 0.5)
    trace.admitted(0.5)
    trace.pooled([batch("one", called_s=1.0), batch("two", Retry("prefill", "NO_NODE"), called_s=1.5)])
    trace.end(Ending(Outcome.FINISHED, None, "alice"), 3.0)
    exported = Exported(3.0, b"".join(traces.exported))
    assert [span.name for span in exported.spans] == ["embeddings llama", "prepare", "queue", "pool", "pool"]
    root = attributes(exported.root)
    assert (root["gen_ai.usage.input_tokens"], root["gen_ai.usage.cache_read.input_tokens"]) == (80, 16)
    assert (root["gen_ai.response.id"], root["baton.request.id"]) == ("rerank-1", "mine")
    assert root["baton.trace.kept_for"] == "retried"
    spans = exported.named("pool")
    assert [attributes(span)["baton.node"] for span in spans] == ["one", "two"]
    assert attributes(spans[1]).items() >= {"baton.queue_s": 0.25, "baton.attempts": 2}.items()
    assert exported.times("pool") == [(1.0, 1.5), (1.5, 2.0)]
    (event,) = exported.root.events
    assert (event.name, {each.key: each.value.string_value for each in event.attributes}["error.type"]) == (
        "retry",
        "NO_NODE",
    )
