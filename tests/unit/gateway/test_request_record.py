"""The end of a request: its outcome and its lines, whatever ended it."""

import logging

import grpc
import pytest

from baton.core.errors import InvalidRequest, NoNode
from baton.gateway.core.shared_counters import Count, SharedCounters
from baton.gateway.observe.meter import RequestMeter
from baton.gateway.observe.recent import Recent
from baton.gateway.observe.request_record import RequestRecord, RequestRecords
from baton.metrics.metric import Outcome
from baton.protos.internal.v1 import decode_pb2, prefill_pb2
from tests.unit.gateway.served import LENGTH, SENT, first_token, reserved, token
from tests.unit.gateway.tracing.traced import Traced


class Recorded:
    """Records of one process, and what they have counted."""

    def __init__(self, *, access_log: bool = False) -> None:
        self.shared_counters = SharedCounters()
        self._records = RequestRecords(
            self.shared_counters, RequestMeter(self.shared_counters.tally), access_log=access_log
        )

    @property
    def recent(self) -> Recent:
        return self._records.recent

    def begin(self) -> RequestRecord:
        return self._records.begin("mine", "alice", answer_id="chatcmpl-1")

    @property
    def outcomes(self) -> dict[str, int]:
        """The outcomes that were counted."""
        totals, first = self.shared_counters.totals(), self.shared_counters.layout.first
        counts = {outcome.value: totals[first("baton_requests_total", (outcome,))] for outcome in Outcome}
        return {outcome: count for outcome, count in counts.items() if count}


def ended(*, index: int, cached_tokens: int) -> Traced:
    """An output of two tokens that was served to its end."""
    output = Traced(index=index)
    output.decode(reserved())
    scheduled = prefill_pb2.PrefillScheduled(cached_tokens=cached_tokens)
    output.prefill(prefill_pb2.PrefillEvent(scheduled=scheduled), first_token(), SENT)
    output.decode(decode_pb2.Admitted(), token(1, LENGTH))
    return output


@pytest.mark.parametrize("error", [grpc.aio.InternalError("x"), ExceptionGroup("", [grpc.aio.InternalError("x")])])
def test_a_client_that_left_while_it_was_written_to_has_cancelled(error: Exception) -> None:
    recorded = Recorded()
    recorded.begin().broken(error)
    assert recorded.outcomes == {"cancelled": 1}
    assert recorded.shared_counters.total(Count.FAILED) == 0


def test_a_defect_is_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    recorded = Recorded()
    with caplog.at_level(logging.INFO, logger="baton"):
        recorded.begin().broken(ValueError("secret"))
    assert recorded.outcomes == {"failed": 1}
    assert "secret" not in caplog.text


def test_the_shared_counters_count_every_output_of_a_request() -> None:
    recorded = Recorded()
    for end in (RequestRecord.finished, lambda record: record.failed(NoNode("x"))):
        record = recorded.begin()
        record.outputs = 3
        end(record)
    assert (recorded.shared_counters.total(Count.FINISHED), recorded.shared_counters.total(Count.FAILED)) == (3, 3)
    assert recorded.outcomes == {"finished": 1, "failed": 1}


def test_the_access_log_has_a_line_for_every_request_and_no_prompt(caplog: pytest.LogCaptureFixture) -> None:
    recorded = Recorded(access_log=True)
    with caplog.at_level(logging.INFO, logger="baton"):
        recorded.begin().failed(InvalidRequest("the prompt is 'secret'", field="prompt", value="secret"))
        recorded.begin().finished()
    fields = [vars(record)["fields"] for record in caplog.records]
    assert [(each["outcome"], each["client"]) for each in fields] == [("client_error", "alice"), ("finished", "alice")]
    assert {each["answer_id"] for each in fields} == {"chatcmpl-1"}
    assert "secret" not in caplog.text
    assert "secret" not in str(fields)


def test_without_the_access_log_only_failures_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    recorded = Recorded()
    with caplog.at_level(logging.INFO, logger="baton"):
        recorded.begin().finished()
        recorded.begin().cancelled()
        recorded.begin().failed(NoNode("no node is there"))
    assert [record.getMessage() for record in caplog.records] == ["request failed: no node is there"]


def test_the_first_output_describes_a_request_whichever_output_ends_first(caplog: pytest.LogCaptureFixture) -> None:
    recorded = Recorded(access_log=True)
    record = recorded.begin()
    with caplog.at_level(logging.INFO, logger="baton"):
        for output in (ended(index=1, cached_tokens=48), ended(index=0, cached_tokens=16)):
            record.output_ended(output.machine, output.journal)
        record.finished()
    (line,) = caplog.records
    fields = vars(line)["fields"]
    assert (fields["cached_tokens"], fields["completion_tokens"]) == (16, 4)
    (shown,) = recorded.recent.newest(10, None)
    assert shown["cached_tokens"] == 16
