"""A long load shows a bar on a terminal, and log lines elsewhere."""

import io
import logging

import pytest
from rich.console import Console

from baton.node.progress import LoadingProgress

GIB = 1 << 30


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_log_gets_a_line_for_every_tenth_with_the_speed(caplog: pytest.LogCaptureFixture) -> None:
    clock, console = Clock(), Console(file=io.StringIO())
    with (
        caplog.at_level(logging.INFO, logger="baton.node.progress"),
        LoadingProgress(console=console, clock=clock) as shown,
    ):
        for step in range(1, 101):
            clock.now_s = step / 10
            shown(step * GIB // 100, GIB)
    assert len(messages(caplog)) == 10
    assert messages(caplog)[0] == "weights: 112 of 1024 MiB, 0.11 GB/s"  # nothing in the first second
    assert messages(caplog)[-1] == "weights: 1024 of 1024 MiB, 0.11 GB/s"


def test_a_short_load_logs_no_line(caplog: pytest.LogCaptureFixture) -> None:
    console = Console(file=io.StringIO())
    with (
        caplog.at_level(logging.INFO, logger="baton.node.progress"),
        LoadingProgress(console=console, clock=Clock()) as shown,
    ):
        shown(GIB, GIB)
        shown(0, 0)
    assert messages(caplog) == []


def test_a_terminal_gets_a_bar_and_the_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    clock, written = Clock(), io.StringIO()
    console = Console(file=written, force_terminal=True, width=120, color_system=None)
    with (
        caplog.at_level(logging.INFO, logger="baton.node.progress"),
        LoadingProgress(console=console, clock=clock) as shown,
    ):
        for step in range(1, 6):
            clock.now_s += 1
            shown(step * GIB // 10, GIB)
    last = written.getvalue().rpartition("weights")[2]
    assert "0.5/1.0 GiB" in last
    assert "107.4 MB/s" in last
    assert "0:00:05" in last
    assert messages(caplog) == []


def test_the_bar_is_shown_only_while_files_are_read() -> None:
    """Log lines before and after the load do not share its line."""
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=120, color_system=None)
    with LoadingProgress(console=console) as shown:
        assert not written.getvalue()
        shown(GIB // 2, GIB)
        assert "weights" in written.getvalue()
        shown(GIB, GIB)
        assert written.getvalue().endswith("\x1b[2K")
        assert "\x1b[?25h" in written.getvalue()


def test_the_bar_is_gone_when_loading_fails() -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=120)

    def fail() -> None:
        with LoadingProgress(console=console) as shown:
            shown(1, GIB)
            raise ValueError("the file is cut off")

    with pytest.raises(ValueError, match="cut off"):
        fail()
    assert written.getvalue().endswith("\x1b[2K")  # the line is erased
    assert "\x1b[?25h" in written.getvalue()  # and the cursor is back
