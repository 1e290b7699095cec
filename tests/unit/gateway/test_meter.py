"""What a gateway counts: how requests ended, and the figures of their outputs."""

import pytest

from baton.core.errors import (
    BatonError,
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    Draining,
    InternalError,
    InvalidRequest,
    NoNode,
    Overloaded,
    PeerRefused,
    PermissionDenied,
    Unauthenticated,
    UnknownModel,
)
from baton.core.types import FinishReason, Path, Receipt, Usage
from baton.gateway.observe.meter import CHAT, COMPLETION, RequestMeter, outcome_of
from baton.gateway.request.output import Ended
from baton.gateway.request.receipt import DECODE, PREFILL, ReceiptDraft, Retry
from baton.metrics.declared import SERVED_MODEL
from baton.metrics.metric import Outcome, ProcessRole
from baton.metrics.tally import Layout, Tally


class Metered:
    """A meter, and what it has counted."""

    def __init__(self) -> None:
        self.tally = Tally(Layout(ProcessRole.GATEWAY))
        self.meter = RequestMeter(self.tally)

    def counter(self, name: str, *labels: str) -> int:
        return self.tally.own()[self.tally.layout.first(name, labels)]

    def observed(self, name: str, *labels: str) -> int:
        first = self.tally.layout.first(name, labels)
        return sum(self.tally.own()[first : first + len(self.tally.layout.metric(name).bounds) + 1])


def ended(path: Path) -> Ended:
    receipt = Receipt(
        path=path, why="", prefill_node="p", decode_node="d", prompt_tokens_sent=0, bytes_sent=0, segments=0,
        transport="", queue_s=0.1, prefill_s=0.2, transfer_s=0.3, ttft_s=0.5, total_s=2.0, attempts=1,
        prefill_cached_tokens=0, segment_bytes=0, kv_converted="", layer_groups=0,
    )  # fmt: skip
    usage = Usage(prompt_tokens=100, completion_tokens=10, cached_tokens=0)
    return Ended(FinishReason.STOP, usage, receipt)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (InvalidRequest("x"), Outcome.CLIENT_ERROR),
        (UnknownModel("x"), Outcome.CLIENT_ERROR),
        (Unauthenticated("x"), Outcome.CLIENT_ERROR),
        (PermissionDenied("x"), Outcome.CLIENT_ERROR),
        (Cancelled("x"), Outcome.CANCELLED),
        (Overloaded("x"), Outcome.REFUSED),
        (DeadlineExceeded("x"), Outcome.DEADLINE),
        (NoNode("x"), Outcome.FAILED),
        (DataLoss("x"), Outcome.FAILED),
        (PeerRefused("x"), Outcome.FAILED),
        (InternalError("x"), Outcome.FAILED),
    ],
)
def test_only_what_the_cluster_did_wrong_is_a_failure(error: BatonError, outcome: Outcome) -> None:
    assert outcome_of(error, begun=True) is outcome


def test_a_drain_refuses_what_has_not_begun_and_fails_the_rest() -> None:
    assert outcome_of(Draining("x"), begun=False) is Outcome.REFUSED
    assert outcome_of(Draining("x"), begun=True) is Outcome.FAILED


def test_a_request_counts_once_with_its_outcome_and_reason() -> None:
    metered = Metered()
    metered.meter.ended(Outcome.FAILED, 1.0, NoNode("x"))
    metered.meter.ended(Outcome.FINISHED, 1.0)
    assert metered.counter("baton_requests_total", "failed") == metered.counter("baton_requests_total", "finished") == 1
    assert metered.counter("baton_request_errors_total", "NO_NODE") == 1
    assert metered.observed("baton_e2e_request_latency_seconds", "failed") == 1


def test_tokens_of_one_message_share_its_gap() -> None:
    metered = Metered()
    metered.meter.first(0.5, 1, 100)
    metered.meter.next(0.03, 3)
    gaps = "baton_inter_token_latency_seconds"
    assert metered.observed("baton_time_to_first_token_seconds") == 1
    assert metered.observed(gaps) == 3
    first, bounds = metered.tally.layout.first(gaps, ()), metered.tally.layout.metric(gaps).bounds
    assert metered.tally.own()[first + bounds.index(0.01)] == 3
    assert metered.counter("baton_generation_tokens_total") == 4
    assert metered.counter("baton_prompt_tokens_total") == 100


def test_only_a_hand_over_has_a_transfer_time() -> None:
    metered = Metered()
    for path in Path:
        metered.meter.output_ended(ended(path), ())
        assert metered.counter("baton_output_path_total", path) == 1
    assert metered.observed("baton_output_transfer_time_seconds") == 2
    assert metered.observed("baton_output_decode_time_seconds") == 3


def test_a_prompt_that_prefill_nodes_failed_fell_back() -> None:
    metered = Metered()
    draft = ReceiptDraft()
    draft.failed("prefill-0 failed (x)", PREFILL, DataLoss("x"))
    draft.failed("prefill-1 failed (y)", PREFILL, NoNode("y"))
    draft.failed("decode-0 was lost (z)", DECODE)
    metered.meter.output_ended(ended(Path.LOCAL), draft.retries)
    assert metered.counter("baton_output_retries_total", "prefill", "DATA_LOSS") == 1
    assert metered.counter("baton_output_retries_total", "decode", "LOST") == 1
    assert metered.counter("baton_output_fallbacks_total", "NO_NODE") == 1
    assert metered.counter("baton_output_fallbacks_total", "DATA_LOSS") == 0


def test_an_output_that_was_not_served_to_its_end_counts_its_retries_only() -> None:
    metered = Metered()
    metered.meter.output_ended(None, [Retry(DECODE, "OVERLOADED")])
    assert metered.counter("baton_output_retries_total", "decode", "OVERLOADED") == 1
    assert metered.observed("baton_output_queue_time_seconds") == 0


def test_the_standard_histograms_know_what_was_asked_for_and_how_it_failed() -> None:
    metered = Metered()
    metered.meter.ended(Outcome.FINISHED, 2.0, operation=CHAT)
    metered.meter.served(0.5, [ended(Path.REMOTE)], operation=CHAT)
    metered.meter.ended(Outcome.REFUSED, 1.0, Overloaded("x"), operation=COMPLETION)
    chat, completion = ((operation, "baton", SERVED_MODEL) for operation in (CHAT, COMPLETION))
    assert metered.observed("gen_ai_server_request_duration_seconds", *chat, "") == 1
    assert metered.observed("gen_ai_server_request_duration_seconds", *completion, "refused") == 1
    for name in ("time_to_first_token", "time_per_output_token"):
        assert metered.observed(f"gen_ai_server_{name}_seconds", *chat) == 1
        assert metered.observed(f"gen_ai_server_{name}_seconds", *completion) == 0


def test_tokens_that_share_a_message_count_by_who_was_behind() -> None:
    metered = Metered()
    metered.meter.merged(3, slow_client=True)
    metered.meter.merged(1, slow_client=False)
    metered.meter.merged(1, slow_client=False)
    merged = [metered.counter("baton_generation_tokens_merged_total", behind) for behind in ("client", "gateway")]
    assert merged == [3, 2]
