"""Traces the requests of one gateway process: begins a trace with each request and decides at its end on the export.

The gateway makes the spans of all stages, including those on nodes, from the times that nodes report in their answers.
So a trace is either complete or absent, even when a node dies, and one process decides.
"""

import random
import time
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.core.errors import BatonError
from baton.core.log_lines import loggable
from baton.gateway.core.request import Request
from baton.gateway.observe.tracing.output_spans import OutputFacts, OutputSpans
from baton.gateway.observe.tracing.pool_spans import batch_span, retry_events
from baton.gateway.request.journal import Journal
from baton.gateway.request.machine import RequestMachine
from baton.gateway.request.pooling import PooledBatch
from baton.metrics.metric import Outcome
from baton.tracing.context import TraceContext, write_traceparent
from baton.tracing.declared import FIRST_TOKEN_EVENT, PREPARE, QUEUE, Attribute
from baton.tracing.sampling import Sampling
from baton.tracing.span import Event, Span


@dataclass(frozen=True)
class Ending:
    """The end of a request."""

    outcome: Outcome
    error: BatonError | None
    client: str


class Encoding(Protocol):
    """Encodes a trace: `baton.gateway.observe.tracing.otlp.SpanEncoder`, which is imported only for exports."""

    def encode(
        self, trace_id: int, spans: Iterable[Span], *, unix_ns: int, at_s: float, state: str = "", remote: bool = False
    ) -> bytes: ...


class Tracer:
    """Begins traces.

    Args:
        model_name: name of the served model.
        put: takes each encoded trace that is exported.
    """

    def __init__(self, sampling: Sampling, encoder: Encoding, model_name: str, put: Callable[[bytes], None]) -> None:
        self.sampling = sampling
        self.encoder = encoder
        self.model_name = model_name
        self.put = put
        self._random = random.Random()  # seeded here, so that a forked process does not draw its parent's ids

    def begin(self, request_id: str, parent: TraceContext | None, now_s: float, answer_id: str = "") -> "RequestTrace":
        trace_id = self._random.getrandbits(128) or 1 if parent is None else parent.trace_id
        return RequestTrace(self, request_id, trace_id, parent, now_s, answer_id or request_id)

    def new_id(self) -> int:
        return self._random.getrandbits(64) or 1


class RequestTrace:
    """The trace of one request.

    Attributes:
        traceparent: traceparent for nodes.
    """

    def __init__(
        self,
        tracer: Tracer,
        request_id: str,
        trace_id: int,
        parent: TraceContext | None,
        now_s: float,
        answer_id: str,
    ) -> None:
        self._tracer = tracer
        self._parent = parent
        self.trace_id = trace_id
        self._sampled = tracer.sampling.at_head(trace_id, parent)
        parent_id = 0 if parent is None else parent.span_id
        self._root = Span("", tracer.new_id(), parent_id, now_s, now_s)
        self._request_id, self._answer_id = request_id, answer_id
        self._request: Request | None = None
        self._prepared_at_s: float | None = None
        self._admitted_at_s: float | None = None
        self._operation, self._model = "text_completion", tracer.model_name
        self._outputs: list[tuple[Journal, RequestMachine, float]] = []
        self._batches: Sequence[PooledBatch] = ()
        self.traceparent = write_traceparent(trace_id, self._root.span_id, sampled=self._sampled)

    def note_request(self, model: str, operation: str) -> None:
        """Records the requested model and the kind of the request."""
        self._model = model or self._model
        self._operation = operation

    def prepared(self, request: Request | None, now_s: float) -> None:
        self._request, self._prepared_at_s = request, now_s

    def admitted(self, now_s: float) -> None:
        self._admitted_at_s = now_s

    def output_ended(self, journal: Journal, machine: RequestMachine, now_s: float) -> None:
        insort(self._outputs, (journal, machine, now_s), key=lambda output: output[0].index)

    def pooled(self, batches: Sequence[PooledBatch]) -> None:
        self._batches = batches

    def end(self, ending: Ending, now_s: float) -> None:
        """Ends the trace and exports it if the sampling rules keep it."""
        root = self._root
        retries = [*(machine.retries for _, machine, _ in self._outputs), *(batch.retries for batch in self._batches)]
        retried = any(retries)
        slow = any(machine.missed_slo(ended_at_s) for _, machine, ended_at_s in self._outputs)
        kept = self._tracer.sampling.at_end(sampled=self._sampled, outcome=ending.outcome, slow=slow, retried=retried)
        if not kept:
            return
        root.name, root.end_s = f"{self._operation} {self._model}", now_s
        root.attributes = self._attributes(ending, kept)
        if ending.error is not None and ending.outcome is not Outcome.CANCELLED:
            root.error = loggable(ending.error)
        spans = [root, *self._waits(now_s)]
        for journal, machine, ended_at_s in self._outputs:
            local = machine.local_prefill
            facts = OutputFacts(ended_at_s, machine.completion_tokens, local, several=len(self._outputs) > 1)
            spans += OutputSpans(journal, root, facts, self._tracer.new_id).build()
        for batch in self._batches:
            spans.append(batch_span(batch, root.span_id, self._tracer.new_id))
            root.events += retry_events(batch)
        for span in spans:
            span.keep_within(root.start_s, now_s)
        first = [machine.first_token_at_s for _, machine, _ in self._outputs if machine.first_token_at_s is not None]
        if first:
            root.attributes[Attribute.FIRST_TOKEN_S] = min(first) - root.start_s
            root.events.append(Event(min(first), FIRST_TOKEN_EVENT))
        root.events.sort(key=lambda event: event.at_s)
        self._tracer.put(
            self._tracer.encoder.encode(
                self.trace_id,
                spans,
                unix_ns=time.time_ns(),
                at_s=time.monotonic(),
                state="" if self._parent is None else self._parent.state,
                remote=self._parent is not None,
            )
        )

    def _waits(self, now_s: float) -> Sequence[Span]:
        root, new_id = self._root, self._tracer.new_id
        prepared_s = now_s if self._prepared_at_s is None else self._prepared_at_s
        spans = [Span(PREPARE.name, new_id(), root.span_id, root.start_s, prepared_s)]
        if self._prepared_at_s is not None:
            admitted_s = now_s if self._admitted_at_s is None else self._admitted_at_s
            spans.append(Span(QUEUE.name, new_id(), root.span_id, prepared_s, admitted_s))
        return spans

    def _attributes(self, ending: Ending, kept: str) -> "dict[Attribute, str | bool | int | float | tuple[str, ...]]":
        found: dict[Attribute, str | bool | int | float | tuple[str, ...]] = {
            Attribute.OPERATION: self._operation,
            Attribute.PROVIDER: "baton",
            Attribute.REQUEST_MODEL: self._model,
            Attribute.RESPONSE_MODEL: self._tracer.model_name,
            Attribute.RESPONSE_ID: self._answer_id,
            Attribute.REQUEST_ID: self._request_id,
            Attribute.OUTCOME: ending.outcome.value,
            Attribute.KEPT: kept,
        }
        if ending.client:
            found[Attribute.CLIENT] = ending.client
        if ending.error is not None and ending.outcome is not Outcome.CANCELLED:
            found[Attribute.ERROR_TYPE] = ending.error.reason
        if self._request is not None:
            found[Attribute.MAX_TOKENS] = self._request.sampling.max_tokens
            found[Attribute.INPUT_TOKENS] = len(self._request.prompt)
        if self._batches:
            found[Attribute.INPUT_TOKENS] = sum(batch.prompt_tokens for batch in self._batches)
            found[Attribute.CACHED_TOKENS] = sum(batch.cached_tokens for batch in self._batches)
            found[Attribute.ATTEMPTS] = sum(batch.attempts for batch in self._batches)
        if len(self._outputs) > 1:
            found[Attribute.CHOICES] = len(self._outputs)
        if self._outputs:
            found[Attribute.OUTPUT_TOKENS] = sum(machine.completion_tokens for _, machine, _ in self._outputs)
        ended = [machine.ended for _, machine, _ in self._outputs if machine.ended is not None]
        if ended:
            receipt = ended[0].receipt
            found[Attribute.CACHED_TOKENS] = ended[0].usage.cached_tokens
            found[Attribute.FINISH_REASONS] = tuple(each.reason.value for each in ended if each.reason is not None)
            found[Attribute.PATH] = receipt.path.value
            found[Attribute.WHY] = receipt.why
            found[Attribute.ATTEMPTS] = receipt.attempts
        if dropped := sum(journal.dropped for journal, _, _ in self._outputs):
            found[Attribute.CUT] = dropped
        return found
