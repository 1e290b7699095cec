"""Records one client's request: counts, traces and logs its end, whatever ended it.

A failure is logged with its cause. Client errors, cancelled requests and refusals are counted, but logged only at level
debug, because a line for each would add load during an overload. The access log has a line for every request.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic, time
from traceback import clear_frames

from baton.core.errors import BatonError, Cancelled, InternalError
from baton.core.log_lines import loggable
from baton.core.logs import enter_request
from baton.gateway.core.request import Request
from baton.gateway.core.shared_counters import Count, SharedCounters
from baton.gateway.observe.meter import COMPLETION, FAILURES, RequestMeter, outcome_of
from baton.gateway.observe.recent import FinishedRequest, Recent
from baton.gateway.observe.tracing.tracer import Ending, Tracer
from baton.gateway.request.journal import Journal
from baton.gateway.request.machine import RequestMachine
from baton.gateway.request.output import Ended
from baton.gateway.request.pooling import PooledBatch
from baton.metrics.metric import Outcome
from baton.rpc.status import is_over
from baton.tracing.context import TraceContext

log = logging.getLogger("baton")
access = logging.getLogger("baton.access")


class RequestRecords:
    """Creates the records of one process.

    Args:
        recent: keeps the last finished requests; None: a new one is created.
        tracer: traces requests; None: they are not traced.
    """

    def __init__(
        self,
        counters: SharedCounters,
        meter: RequestMeter,
        *,
        access_log: bool,
        recent: Recent | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.shared_counters = counters
        self.meter = meter
        self.access_log = access_log
        self.recent = recent or Recent()
        self.tracer = tracer

    def begin(
        self, request_id: str, client: str, caller_trace: TraceContext | None = None, *, answer_id: str = ""
    ) -> "RequestRecord":
        """Begins the record of a request that the current task serves.

        Args:
            answer_id: id that the client gets with the answer; empty: none but the request's.
        """
        enter_request(request_id)
        return RequestRecord(self, request_id, client, caller_trace, answer_id)


class RequestRecord:
    """The record of one request.

    Attributes:
        outputs: number of outputs that it samples.
        trace: trace of the request; None: it is not traced.
    """

    def __init__(
        self,
        records: RequestRecords,
        request_id: str,
        client: str,
        caller_trace: TraceContext | None = None,
        answer_id: str = "",
    ) -> None:
        self.request_id = request_id
        self.answer_id = answer_id
        self.client = client
        self.started_at_s = monotonic()
        self.outputs = 1
        self._records = records
        tracer = records.tracer
        self.trace = None if tracer is None else tracer.begin(request_id, caller_trace, self.started_at_s, answer_id)
        self._begun = False
        self._ended_by_index: dict[int, Ended] = {}  # the first output's receipt describes the request
        self._failures = ""
        self._admitted_s: float | None = None
        self._ttft_s: float | None = None
        self._journal: Journal | None = None
        self._tokens = 0
        self._operation = COMPLETION
        self._pooled: Sequence[PooledBatch] = ()

    @property
    def traceparent(self) -> str:
        """The traceparent for nodes; empty if the request is not traced."""
        return "" if self.trace is None else self.trace.traceparent

    def note_request(self, model: str, operation: str) -> None:
        """Records the requested model and the kind of the request: CHAT, COMPLETION or EMBEDDINGS."""
        self._operation = operation
        if self.trace is not None:
            self.trace.note_request(model, operation)

    def prepared(self, request: Request | None = None) -> None:
        """Records that the request is validated and tokenized. `request`: what nodes generate for, if anything."""
        if self.trace is not None:
            self.trace.prepared(request, monotonic())

    def admitted(self) -> None:
        """Records that the request is admitted."""
        self._begun = True
        now_s = monotonic()
        self._admitted_s = now_s - self.started_at_s
        if self.trace is not None:
            self.trace.admitted(now_s)
        self._records.meter.admitted(self._admitted_s)

    def output_ended(self, machine: RequestMachine, journal: Journal) -> None:
        """Records the end of one output."""
        if self.trace is not None:
            self.trace.output_ended(journal, machine, monotonic())
        self._records.meter.output_ended(machine.ended, machine.retries)
        self._failures = self._failures or machine.failures
        self._tokens += machine.new_tokens
        if self._journal is None or journal.index < self._journal.index:
            self._journal = journal
            first_at_s = machine.first_token_at_s
            self._ttft_s = None if first_at_s is None else first_at_s - self.started_at_s
        if machine.ended is not None:
            self._ended_by_index[journal.index] = machine.ended

    def pooled(self, batches: Sequence[PooledBatch]) -> None:
        """Records the batches of a request whose prompts were pooled."""
        self._pooled = batches
        if self.trace is not None:
            self.trace.pooled(batches)

    # ---- its end

    @contextmanager
    def until_end(self) -> Iterator[None]:
        """Records how the block ends, and names the request in an error that ends it."""
        try:
            yield
        except BatonError as error:
            error.request_id = self.request_id
            self.failed(error)
            clear_frames(error.__traceback__)  # the frames refer to the error: a cycle would keep the request alive
            raise
        except asyncio.CancelledError as error:
            self.cancelled()
            clear_frames(error.__traceback__)
            raise
        except Exception as error:
            self.broken(error)
            raise
        self.finished()

    def finished(self) -> None:
        """Records that the request was served to its end."""
        self._end(Outcome.FINISHED)

    def cancelled(self) -> None:
        """Records that the client has left."""
        self._end(Outcome.CANCELLED, Cancelled("the client disconnected"))

    def failed(self, error: BatonError) -> None:
        """Records the error that ended the request."""
        self._end(outcome_of(error, begun=self._begun), error)

    def broken(self, error: Exception) -> None:
        """Records an exception that is no BatonError: the client has left, or a bug, whose traceback the API logs."""
        if is_over(error):
            self.cancelled()
            return
        self._end(Outcome.FAILED, InternalError(f"{type(error).__name__} in the gateway"))

    @property
    def _ended(self) -> list[Ended]:
        """The outputs that were served to their end, in the order of their indices."""
        return [ended for _, ended in sorted(self._ended_by_index.items())]

    def _end(self, outcome: Outcome, error: BatonError | None = None) -> None:
        records, seconds = self._records, monotonic() - self.started_at_s
        records.meter.ended(outcome, seconds, error, operation=self._operation)
        if outcome is Outcome.FINISHED:
            records.meter.served(self._ttft_s, self._ended, operation=self._operation)
        if self.trace is not None:
            self.trace.end(Ending(outcome, error, self.client), self.started_at_s + seconds)
        if outcome is Outcome.FINISHED:
            records.shared_counters.add(Count.FINISHED, self.outputs)
        elif outcome in FAILURES:
            records.shared_counters.add(Count.FAILED, self.outputs)
        if error is not None:
            level = logging.WARNING if outcome in FAILURES else logging.DEBUG
            fields = {"outcome": outcome.value, "reason": error.reason, "total_s": seconds, **self._trace_id()}
            log.log(level, "request failed: %s", loggable(error), extra={"fields": fields})
        self._add_to_recent(outcome, seconds, error)
        if records.access_log:
            access.info("request", extra={"fields": self._access_fields(outcome, seconds)})

    def _add_to_recent(self, outcome: Outcome, seconds: float, error: BatonError | None) -> None:
        self._records.recent.add(
            FinishedRequest(
                ended_at_s=time(),
                started_at_s=self.started_at_s,
                request_id=self.request_id,
                client=self.client,
                outcome=outcome.value,
                reason="" if error is None else error.reason,
                error="" if error is None else loggable(error),
                failures=self._failures,
                admitted_s=self._admitted_s,
                ttft_s=self._ttft_s,
                total_s=seconds,
                outputs=self.outputs,
                completion_tokens=self._tokens,
                ended=self._ended[0] if self._ended else None,
                journal=self._journal,
            )
        )

    def _access_fields(self, outcome: Outcome, seconds: float) -> dict[str, object]:
        """Fields of the request's line in the access log, without prompt and output."""
        fields: dict[str, object] = {"outcome": outcome.value, "client": self.client, "outputs": self.outputs}
        if self._ended:
            ended, receipt = self._ended[0], self._ended[0].receipt
            fields |= {
                "prompt_tokens": ended.usage.prompt_tokens,
                "cached_tokens": ended.usage.cached_tokens,
                "completion_tokens": sum(each.usage.completion_tokens for each in self._ended),
                "path": receipt.path.value,
                "prefill_node": receipt.prefill_node,
                "decode_node": receipt.decode_node,
                "ttft_s": receipt.ttft_s,
                "queue_s": receipt.queue_s,
                "prefill_s": receipt.prefill_s,
                "transfer_s": receipt.transfer_s,
                "bytes_sent": receipt.bytes_sent,
                "transport": receipt.transport,
                "attempts": receipt.attempts,
            }
        if self._pooled:
            fields |= {
                "prompt_tokens": sum(batch.prompt_tokens for batch in self._pooled),
                "cached_tokens": sum(batch.cached_tokens for batch in self._pooled),
                "prefill_node": ",".join(dict.fromkeys(batch.node for batch in self._pooled)),
                "attempts": sum(batch.attempts for batch in self._pooled),
            }
        if self._failures:
            fields["failures"] = self._failures
        if self.answer_id:
            fields["answer_id"] = self.answer_id
        return {**fields, "total_s": seconds, **self._trace_id()}

    def _trace_id(self) -> dict[str, object]:
        return {} if self.trace is None else {"trace_id": f"{self.trace.trace_id:032x}"}
