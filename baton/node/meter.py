"""Counts engine steps and leases of a node as they end; other metrics are read at the scrape. Pure."""

from baton.engine.events import StepEvents
from baton.metrics.metric import ProcessRole
from baton.metrics.tally import Layout, Tally
from kvtransfer.leases import LeaseTotals


class NodeMeter:
    """The counters of one node. Their cost per step does not grow with the number of tokens.

    Attributes:
        layout, tally: of its metrics.
    """

    def __init__(self, role: ProcessRole) -> None:
        self.layout = Layout(role)
        self.tally = tally = Tally(self.layout)
        self._steps = {
            kind: tally.histogram("baton_engine_step_time_seconds", kind) for kind in ("prefill", "decode", "mixed")
        }
        self._queue = tally.histogram("baton_engine_queue_time_seconds")
        self._prompt_tokens = tally.counter("baton_prompt_tokens_total")
        self._generated = tally.counter("baton_generation_tokens_total")
        self._drafted = tally.counter("baton_spec_decode_num_draft_tokens_total")
        self._accepted = tally.counter("baton_spec_decode_num_accepted_tokens_total")
        self._failed = tally.counters("baton_engine_requests_failed_total")
        self._leases = tally.histogram("baton_kv_transfer_time_seconds") if role is ProcessRole.DECODE else None

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens computed so far."""
        return self._prompt_tokens.value

    @property
    def drafts(self) -> tuple[int, int]:
        """Draft tokens so far, and those that were accepted."""
        return self._drafted.value, self._accepted.value

    @property
    def generated_tokens(self) -> int:
        return self._generated.value

    def step(self, events: StepEvents) -> None:
        """Counts a step that has ended. A step that only reports its layers is counted when it ends."""
        if events.seconds:
            self._steps[_kind(events)].observe(events.seconds)
        if events.tokens:
            self._generated.add(len(events.tokens))
        for chunk in events.chunks:
            self._prompt_tokens.add(chunk.token_stop - chunk.token_start)
        for started in events.started:
            self._queue.observe(started.queue_s)
        for drafts in events.drafts:
            self._drafted.add(drafts.drafted)
            self._accepted.add(drafts.accepted)
        for failed in events.failed:
            self._failed[failed.error.reason].add()

    def lease_closed(self, totals: LeaseTotals) -> None:
        """Counts a lease that has ended."""
        if self._leases is not None and totals.segments:
            self._leases.observe(totals.seconds)


def _kind(events: StepEvents) -> str:
    """The kind of a step: prefill, decode or mixed. The rows of decodes come first."""
    if not events.chunks:
        return "decode"
    prompts = {chunk.request_id for chunk in events.chunks}
    return "mixed" if any(token.request_id not in prompts for token in events.tokens) else "prefill"
