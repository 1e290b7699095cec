"""Signals end a node that does not serve yet, whatever it waits for, and an end does not wait for the interpreter."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

WAITS_IN_C = """
import ctypes, signal, sys
from baton.node.process import ending_at_signals
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
with ending_at_signals():
    library.pthread_mutex_lock(mutex)
    print("waits", flush=True)
    library.pthread_mutex_lock(mutex)  # for ever, and no Python runs in this thread
"""
ENDS_IN_PYTHON = """
import signal, sys, time
from baton.node.process import ending_at_signals
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
with ending_at_signals():
    pass
print("waits", flush=True)
while True:
    time.sleep(60)
"""


NEVER_EXITS = """
import atexit, threading
from baton.core.exits import exit_at_once
atexit.register(threading.Event().wait)
threading.Thread(target=threading.Event().wait).start()
"""
WRITES_IN_VAIN = """
import sys
from baton.core import exits
exits.WRITE_S = 0.5
sys.stdout = open(1, 'w')
print('a line')
exit_at_once(3)
"""
HOLDS_THE_INTERPRETER = """
import ctypes
from baton.core.exits import exit_within
exit_within(0.01)
ctypes.PyDLL(None).pause()  # for ever, and no Python runs in this process
"""


CLOSES_SLOWLY = """
import time
from baton.core import exits
limit_s, exits.END_S = exits.END_S, 0.01
try:
    with exits.ending_soon_if_it_fails():
        raise ValueError
except ValueError:
    time.sleep(0.1)
    exits.END_S = limit_s
    exits.exit_at_once(3)
"""


def ended(program: str, number: int) -> int:
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "waits\n"
            process.send_signal(number)
            return process.wait(300)
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_wait_outside_of_python_ends(number: int) -> None:
    assert ended(WAITS_IN_C, number) == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 3), (signal.SIGINT, -signal.SIGINT)])
def test_afterwards_the_handlers_count(number: int, code: int) -> None:
    assert ended(ENDS_IN_PYTHON, number) == code


def test_an_end_waits_for_no_thread_and_runs_no_exit_handler() -> None:
    program = f"{NEVER_EXITS}from baton.core import exits\nexits.WRITE_S = 60.0\nexit_at_once(3)"
    done = subprocess.run([sys.executable, "-c", program], timeout=300, check=False)
    assert done.returncode == 3


def test_an_end_does_not_wait_for_a_pipe_that_nobody_reads() -> None:
    program = f"{NEVER_EXITS}{WRITES_IN_VAIN}"
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    with suppress(BlockingIOError):
        while os.write(writes, bytes(1 << 12)):
            pass
    os.set_blocking(writes, True)
    try:
        done = subprocess.run([sys.executable, "-c", program], stdout=writes, timeout=300, check=False)
    finally:
        os.close(reads)
        os.close(writes)
    assert done.returncode == 1


def test_an_end_does_not_need_the_interpreter() -> None:
    done = subprocess.run([sys.executable, "-c", HOLDS_THE_INTERPRETER], timeout=300, check=False)
    assert done.returncode == 1


def test_an_error_keeps_its_exit_code_although_closing_takes_longer_than_an_end() -> None:
    done = subprocess.run([sys.executable, "-c", CLOSES_SLOWLY], timeout=300, check=False)
    assert done.returncode == 3
