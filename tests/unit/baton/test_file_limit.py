"""The number of files that a process may open, which also limits its connections."""

import resource

import pytest

from baton.core.file_limit import raise_file_limit


@pytest.mark.parametrize(("hard", "warns"), [(150, True), (65536, False), (resource.RLIM_INFINITY, False)])
def test_a_low_limit_is_warned_of_because_connections_above_it_get_no_answer(
    hard: int, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (140, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    raise_file_limit()
    assert limits == [(150 if warns else 65536, hard)]
    assert ("may open 150 files" in caplog.text) == warns
