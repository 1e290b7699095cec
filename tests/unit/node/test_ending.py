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
HOLDS_THE_INTERPRETER = """
import ctypes
from baton.core.exits import exit_within
exit_within(0.01)
ctypes.PyDLL(None).pause()  # for ever, and no Python runs in this process
"""


def ended(program: str, number: int) -> int:
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "waits\n"
            process.send_signal(number)
            return process.wait(60)
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_wait_outside_of_python_ends(number: int) -> None:
    assert ended(WAITS_IN_C, number) == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 3), (signal.SIGINT, -signal.SIGINT)])
def test_afterwards_the_handlers_count(number: int, code: int) -> None:
    assert ended(ENDS_IN_PYTHON, number) == code


def test_an_end_waits_for_no_thread_and_runs_no_exit_handler() -> None:
    program = f"{NEVER_EXITS}from baton.core import exits\nexits.END_S = 60.0\nexit_at_once(3)"
    done = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert done.returncode == 3


def test_an_end_does_not_wait_for_a_pipe_that_nobody_reads() -> None:
    program = f"{NEVER_EXITS}import sys\nsys.stdout = open(1, 'w')\nprint('a line')\nexit_at_once(3)"
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    with suppress(BlockingIOError):
        while os.write(writes, bytes(1 << 12)):
            pass
    os.set_blocking(writes, True)
    try:
        done = subprocess.run([sys.executable, "-c", program], stdout=writes, timeout=60, check=False)
    finally:
        os.close(reads)
        os.close(writes)
    assert done.returncode == 1


def test_an_end_does_not_need_the_interpreter() -> None:
    done = subprocess.run([sys.executable, "-c", HOLDS_THE_INTERPRETER], timeout=60, check=False)
    assert done.returncode == 1
