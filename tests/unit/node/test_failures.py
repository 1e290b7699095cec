"""What a node logs about single requests: the client's id and the cause, at a level that fits."""

import logging

import pytest

from baton.core.errors import BatonError, Cancelled, DataLoss, InternalError, InvalidRequest, Overloaded
from baton.node.failures import log_failure


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (InternalError("a step failed"), "WARNING"),
        (DataLoss("the link broke"), "WARNING"),
        (Cancelled("the gateway cancelled the call"), "DEBUG"),
        (Overloaded("no room"), "DEBUG"),
    ],
)
def test_only_what_went_wrong_here_is_a_warning(
    error: BatonError, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="baton"):
        log_failure(error, "mine", "1.7")
    (line,) = caplog.records
    assert (line.levelname, line.getMessage()) == (level, f"request failed here: {error}")
    assert vars(line)["fields"] == {"request_id": "mine", "engine_id": "1.7", "reason": error.reason}


def test_no_line_shows_what_a_client_sent(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="baton"):
        log_failure(InvalidRequest("the prompt is 'secret'", field="prompt", value="secret"), "mine", "1.7")
    assert "secret" not in caplog.text
