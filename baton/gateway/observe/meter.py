"""Updates the gateway's metrics from events of its requests. Pure.

The times of an output come from its receipt, once at its end. Only first tokens and gaps between tokens are counted as
they come.
"""

from collections.abc import Sequence

from baton.core.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    Overloaded,
    PermissionDenied,
    Unauthenticated,
    UnknownModel,
)
from baton.core.types import Path
from baton.gateway.request.output import Ended
from baton.gateway.request.receipt import DECODE, PREFILL, Retry
from baton.metrics.declared import LOST, REASONS, SERVED_MODEL
from baton.metrics.metric import Outcome
from baton.metrics.tally import Tally

_OUTCOMES: tuple[tuple[tuple[type[BatonError], ...], Outcome], ...] = (
    ((InvalidRequest, UnknownModel, Unauthenticated, PermissionDenied), Outcome.CLIENT_ERROR),
    ((Cancelled,), Outcome.CANCELLED),
    ((DeadlineExceeded,), Outcome.DEADLINE),
    ((Overloaded,), Outcome.REFUSED),
)
CHAT, COMPLETION, EMBEDDINGS = "chat", "text_completion", "embeddings"
OPERATIONS = (CHAT, COMPLETION, EMBEDDINGS)
FAILURES = frozenset({Outcome.DEADLINE, Outcome.FAILED})


def outcome_of(error: BatonError, *, begun: bool) -> Outcome:
    """The outcome of a request that ended with this error.

    Args:
        begun: whether the request was admitted; one that a draining gateway refuses was not.
    """
    for errors, outcome in _OUTCOMES:
        if isinstance(error, errors):
            return outcome
    return Outcome.REFUSED if isinstance(error, Draining) and not begun else Outcome.FAILED


class StandardHistograms:
    """OpenTelemetry's standard histograms for one operation."""

    def __init__(self, tally: Tally, operation: str) -> None:
        labels = (operation, "baton", SERVED_MODEL)
        self.durations = {
            outcome: tally.histogram(
                "gen_ai_server_request_duration_seconds",
                *labels,
                "" if outcome is Outcome.FINISHED else outcome.value,
            )
            for outcome in Outcome
        }
        self.first_token = tally.histogram("gen_ai_server_time_to_first_token_seconds", *labels)
        self.per_token = tally.histogram("gen_ai_server_time_per_output_token_seconds", *labels)


class RequestMeter:
    """Counts the requests of one process of a gateway."""

    def __init__(self, tally: Tally) -> None:
        self._first_token = tally.histogram("baton_time_to_first_token_seconds")
        self._gap = tally.histogram("baton_inter_token_latency_seconds")
        self._tokens = tally.counter("baton_generation_tokens_total")
        self._prompt_tokens = tally.counter("baton_prompt_tokens_total")
        self._merged = tally.counters("baton_generation_tokens_merged_total")
        self._requests = tally.counters("baton_requests_total")
        self._errors = tally.counters("baton_request_errors_total")
        self._door_errors = tally.counters("baton_http_errors_total")
        self._unknown_fields = tally.counter("baton_http_unknown_fields_total")
        self._success = tally.counters("baton_output_success_total")
        self._paths = tally.counters("baton_output_path_total")
        self._retries = {
            Retry(stage, reason): tally.counter("baton_output_retries_total", stage, reason)
            for stage in (PREFILL, DECODE)
            for reason in (*REASONS, LOST)
        }
        self._fallbacks = tally.counters("baton_output_fallbacks_total")
        self._prompt_length = tally.histogram("baton_output_prompt_tokens")
        self._output_length = tally.histogram("baton_output_generation_tokens")
        self._e2e = {each.value: tally.histogram("baton_e2e_request_latency_seconds", each) for each in Outcome}
        self._admission = tally.histogram("baton_request_admission_time_seconds")
        self._queue = tally.histogram("baton_output_queue_time_seconds")
        self._prefill = tally.histogram("baton_output_prefill_time_seconds")
        self._transfer = tally.histogram("baton_output_transfer_time_seconds")
        self._decode = tally.histogram("baton_output_decode_time_seconds")
        self._standard = {operation: StandardHistograms(tally, operation) for operation in OPERATIONS}

    # ---- tokens

    def first(self, seconds: float, tokens: int, prompt_tokens: int) -> None:
        """Counts the first message of an output, `seconds` after its request's arrival."""
        self._first_token.observe(seconds)
        self._prompt_tokens.add(prompt_tokens)
        self._tokens.add(tokens)
        if tokens > 1:
            self._gap.observe(0.0, tokens - 1)

    def next(self, seconds: float, tokens: int) -> None:
        """Counts a further message, `seconds` after the one before it."""
        self._gap.observe(seconds / tokens, tokens)
        self._tokens.add(tokens)

    def merged(self, tokens: int, slow_client: bool) -> None:
        """Counts tokens that shared a message with an earlier one, by who was behind."""
        self._merged["client" if slow_client else "gateway"].add(tokens)

    # ---- requests

    def admitted(self, seconds: float) -> None:
        """Counts an admission, `seconds` after the request's arrival."""
        self._admission.observe(seconds)

    def ended(
        self, outcome: Outcome, seconds: float, error: BatonError | None = None, *, operation: str = COMPLETION
    ) -> None:
        """Counts the end of a request, `seconds` after its arrival.

        Args:
            operation: CHAT, COMPLETION or EMBEDDINGS.
        """
        self._requests[outcome].add()
        self._e2e[outcome].observe(seconds)
        self._standard[operation].durations[outcome].observe(seconds)
        if error is not None:
            self._errors[error.reason].add()

    def served(self, ttft_s: float | None, outputs: Sequence[Ended], *, operation: str) -> None:
        """Counts a request that was served to its end. `ttft_s` is None if it had no token."""
        standard = self._standard[operation]
        if ttft_s is not None:
            standard.first_token.observe(ttft_s)
        for output in outputs:
            later = output.usage.completion_tokens - 1
            if later > 0:
                standard.per_token.observe((output.receipt.total_s - output.receipt.ttft_s) / later)

    def pooled(self, *, prompt_tokens: int, queue_s: float, prefill_s: float, retries: Sequence[Retry]) -> None:
        """Counts prompts that one prefill node has pooled together."""
        for retry in retries:
            self._retries[retry].add()
        self._prompt_tokens.add(prompt_tokens)
        self._queue.observe(queue_s)
        self._prefill.observe(prefill_s)

    def refused_at_door(self, error: BatonError) -> None:
        """Counts a message that failed before it became a request."""
        self._door_errors[error.reason].add()

    def unknown_fields(self, count: int) -> None:
        """Counts a body's fields that were accepted without effect because no endpoint has them."""
        self._unknown_fields.add(count)

    def output_ended(self, ended: Ended | None, retries: Sequence[Retry]) -> None:
        """Counts the end of an output. `ended` is None if it was not served to its end."""
        for retry in retries:
            self._retries[retry].add()
        if ended is None:
            return
        receipt, usage = ended.receipt, ended.usage
        if ended.reason is not None:
            self._success[ended.reason].add()
        self._paths[receipt.path].add()
        if receipt.path is Path.LOCAL and (reason := _last_failure(retries)):
            self._fallbacks[reason].add()
        self._prompt_length.observe(usage.prompt_tokens)
        self._output_length.observe(usage.completion_tokens)
        self._queue.observe(receipt.queue_s)
        self._prefill.observe(receipt.prefill_s)
        if receipt.path is not Path.LOCAL:
            self._transfer.observe(receipt.transfer_s)
        self._decode.observe(receipt.total_s - receipt.ttft_s)


def _last_failure(retries: Sequence[Retry]) -> str | None:
    """The reason of the last prefill node's failure, or None if none failed."""
    return next((reason for stage, reason in reversed(retries) if stage == PREFILL), None)
