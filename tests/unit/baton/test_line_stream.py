"""A stream of lines that waits for no reader: order, bounds, counts, and what is left at the end of a process."""

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.core.line_stream import _DRAIN_S, LineStream

DEADLINE_S = 60.0
PIPE_BYTES = 4096


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A small pipe: the end to read, and the end to write."""
    ours, theirs = os.pipe()
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def read_lines(ours: int, until: str) -> list[str]:
    """The lines up to the first that begins so."""
    lines = []
    with open(ours, closefd=False) as file:
        for line in file:
            lines.append(line.rstrip("\n"))
            if line.startswith(until):
                return lines
    raise AssertionError(f"the stream has ended without {until!r}")


def test_lines_come_whole_and_in_order(pipe: tuple[int, int]) -> None:
    ours, theirs = pipe
    stream = LineStream(theirs)
    print("one", "two", file=stream)
    stream.write("three\nfour")
    stream.write(" five\nlast\n")
    assert read_lines(ours, "last") == ["one two", "three", "four five", "last"]


def test_a_writer_does_not_wait_for_a_reader_and_no_line_within_the_bound_is_lost(pipe: tuple[int, int]) -> None:
    ours, theirs = pipe
    stream = LineStream(theirs)
    written = [f"line {number} {'x' * 200}" for number in range(1000)]
    for line in written:
        print(line, file=stream)
    print("last", file=stream)
    assert read_lines(ours, "last") == [*written, "last"]
    assert stream.dropped_total == 0


def test_lines_beyond_the_bound_are_dropped_and_counted_and_a_line_says_so(pipe: tuple[int, int]) -> None:
    ours, theirs = pipe
    counted: list[int] = []
    stream = LineStream(theirs, held_bytes_max=20_000)
    stream.on_dropped = counted.append
    stream.notice = lambda lines: f"dropped {lines}"
    for number in range(1000):
        print(f"{number:99}", file=stream)
    found = read_lines(ours, "dropped")
    kept, notice = found[:-1], found[-1]
    assert [int(line) for line in kept] == list(range(len(kept)))
    assert 200 <= len(kept) <= 200 + PIPE_BYTES // 100 + 1
    assert notice == f"dropped {1000 - len(kept)}"
    assert stream.dropped_total == sum(counted) == 1000 - len(kept)
    print("after", file=stream)
    assert read_lines(ours, "after") == ["after"]


def test_a_line_too_long_for_the_pipe_comes_whole(pipe: tuple[int, int]) -> None:
    ours, theirs = pipe
    stream = LineStream(theirs)
    long = "y" * 10 * PIPE_BYTES
    print(long, file=stream)
    print("last", file=stream)
    assert read_lines(ours, "last") == [long, "last"]


def test_a_pipe_that_another_process_made_non_blocking_loses_nothing(pipe: tuple[int, int]) -> None:
    ours, theirs = pipe
    os.set_blocking(theirs, False)
    stream = LineStream(theirs)
    written = [f"{number:999}" for number in range(50)]
    for line in written:
        print(line, file=stream)
    print("last", file=stream)
    assert read_lines(ours, "last") == [*written, "last"]


def test_lines_without_a_reader_are_counted() -> None:
    gone, to_nobody = os.pipe()
    os.close(gone)
    stream = LineStream(to_nobody)
    print("lost", file=stream)
    assert stream.drain(DEADLINE_S)
    assert stream.dropped_total == 1
    os.close(to_nobody)


class LateThread(LineStream):
    """A stream whose thread gets no turn for longer than a drain waits for a reader."""

    def _write(self, data: bytes, within_s: float | None = None) -> bool:
        threading.Event().wait(1.5 * _DRAIN_S)
        return super()._write(data, within_s)


def test_a_drain_waits_for_the_thread_that_writes_while_there_is_room(tmp_path: Path) -> None:
    with (tmp_path / "lines").open("w") as file:
        stream = LateThread(file.fileno())
        print("one", file=stream)
        print("last", file=stream)
        assert stream.drain()
        assert (tmp_path / "lines").read_text() == "one\nlast\n"


def test_characters_that_the_encoding_lacks_are_escaped(pipe: tuple[int, int]) -> None:
    ours, theirs = pipe
    stream = LineStream(theirs, encoding="ascii")
    print("Zürich \udce9", file=stream)
    assert read_lines(ours, "Z") == [r"Z\xfcrich \udce9"]


@pytest.mark.parametrize(
    ("end", "code"), [("", 0), ("raise ValueError('the cause')", 1), ("logging.shutdown(); os._exit(3)", 3)]
)
def test_all_is_written_before_a_process_ends(end: str, code: int) -> None:
    program = (
        "import logging, os\n"
        "from baton.core import line_stream\n"
        "from baton.core.logs import set_up_logging\n"
        f"line_stream._DRAIN_S = {DEADLINE_S}  # however slowly the lines are read\n"
        "set_up_logging('info', role='gateway')\n"
        "for number in range(3000): logging.getLogger('baton').info('line %d', number)\n"
    )
    command = [sys.executable, "-c", program + end]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    lines = done.stderr.splitlines()
    assert done.returncode == code
    assert [line.split()[-1] for line in lines[:3000]] == [str(number) for number in range(3000)]
    assert ("ValueError: the cause" in done.stderr) == (code == 1)


@pytest.mark.parametrize("end", ["", "raise ValueError", "sys.exit('a last word')", "logging.shutdown(); os._exit(0)"])
def test_a_process_ends_although_nobody_reads_what_it_writes(pipe: tuple[int, int], end: str) -> None:
    program = (
        "import logging, os, sys, threading, warnings\n"
        "from baton.core.logs import set_up_logging\n"
        "set_up_logging('info', role='gateway')\n"
        "for number in range(1000): logging.getLogger('baton').info('line %d', number)\n"
        "print('x' * 100_000, file=sys.stderr)\n"
        "warnings.warn('careful')\n"
    )
    _, theirs = pipe
    done = subprocess.run([sys.executable, "-c", program + end], stderr=theirs, timeout=DEADLINE_S, check=False)
    assert done.returncode == (end not in ("", "logging.shutdown(); os._exit(0)"))
