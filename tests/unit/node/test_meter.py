"""A node counts its steps, tokens and leases."""

import pytest

from baton.core.errors import InternalError
from baton.core.types import TokenOutput
from baton.engine.events import ChunkComputed, DraftsChecked, RequestFailed, RequestStarted, StepEvents, TokenSampled
from baton.metrics.metric import ProcessRole
from baton.metrics.tally import Layout
from baton.node.meter import NodeMeter
from kvtransfer.leases import LeaseTotals


def cells(meter: NodeMeter, name: str, *labels: str, count: int = 1) -> list[int]:
    """The first cells of a series."""
    first = meter.layout.first(name, labels)
    return meter.tally.own()[first : first + count]


def observed(meter: NodeMeter, name: str, *labels: str) -> int:
    """How many values a histogram has."""
    return sum(cells(meter, name, *labels, count=len(meter.layout.metric(name).bounds) + 1))


def chunk(name: str, start: int, stop: int) -> ChunkComputed:
    return ChunkComputed(name, start, stop, (0,))


def token(name: str) -> TokenSampled:
    return TokenSampled(name, TokenOutput(1, 0), None, "")


@pytest.mark.parametrize(
    ("kind", "events"),
    [
        ("decode", StepEvents(1, 0.01, tokens=(token("a"), token("b")))),
        ("prefill", StepEvents(1, 0.01, chunks=(chunk("a", 0, 8), chunk("b", 0, 4)), tokens=(token("b"),))),
        ("mixed", StepEvents(1, 0.01, chunks=(chunk("b", 0, 8),), tokens=(token("a"), token("b")))),
    ],
)
def test_steps_are_counted_by_what_they_compute(kind: str, events: StepEvents) -> None:
    meter = NodeMeter(ProcessRole.PREFILL)
    meter.step(events)
    counts = {each: observed(meter, "baton_engine_step_time_seconds", each) for each in ("prefill", "decode", "mixed")}
    assert counts == {"prefill": 0, "decode": 0, "mixed": 0} | {kind: 1}
    assert cells(meter, "baton_generation_tokens_total") == [len(events.tokens)]
    assert cells(meter, "baton_prompt_tokens_total") == [
        sum(each.token_stop - each.token_start for each in events.chunks)
    ]


def test_marks_of_a_running_step_and_refusals_are_no_steps() -> None:
    meter = NodeMeter(ProcessRole.DECODE)
    meter.step(StepEvents(1, 0.0, failed=(RequestFailed("a", InternalError("gone")),)))
    assert observed(meter, "baton_engine_step_time_seconds", "decode") == 0
    assert cells(meter, "baton_engine_requests_failed_total", "INTERNAL") == [1]


def test_waits_in_the_engine_are_counted() -> None:
    meter = NodeMeter(ProcessRole.PREFILL)
    meter.step(StepEvents(1, 0.01, started=(RequestStarted("a", 0, 2.0),), chunks=(chunk("a", 0, 8),)))
    assert observed(meter, "baton_engine_queue_time_seconds") == 1


@pytest.mark.parametrize("role", [ProcessRole.PREFILL, ProcessRole.DECODE])
def test_a_lease_that_received_nothing_took_no_time(role: ProcessRole) -> None:
    meter = NodeMeter(role)
    meter.lease_closed(LeaseTotals(1, bytes=0, segments=0, seconds=0.0))
    meter.lease_closed(LeaseTotals(2, bytes=8, segments=1, seconds=0.5))
    if role is ProcessRole.DECODE:
        assert observed(meter, "baton_kv_transfer_time_seconds") == 1
    assert meter.layout.width == Layout(role).width


def test_draft_tokens_are_counted_with_those_that_were_kept() -> None:
    meter = NodeMeter(ProcessRole.DECODE)
    assert meter.drafts == (0, 0)
    tokens = (token("a"), token("a"), token("b"))
    meter.step(StepEvents(1, 0.01, tokens=tokens, drafts=(DraftsChecked("a", 4, 1), DraftsChecked("b", 2, 0))))
    assert cells(meter, "baton_spec_decode_num_draft_tokens_total") == [6]
    assert cells(meter, "baton_spec_decode_num_accepted_tokens_total") == [1]
    assert meter.drafts == (6, 1)
