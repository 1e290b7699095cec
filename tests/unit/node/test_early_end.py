"""SIGTERM ends a node that does not serve yet, whatever it waits for."""

import signal
import subprocess
import sys

WAITS_IN_C = """
import ctypes, signal, sys
from node.early_end import ending_at_sigterm
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
with ending_at_sigterm():
    library.pthread_mutex_lock(mutex)
    print("waits", flush=True)
    library.pthread_mutex_lock(mutex)  # for ever, and no Python runs in this thread
"""
ENDS_IN_PYTHON = """
import signal, sys, time
from node.early_end import ending_at_sigterm
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
with ending_at_sigterm():
    pass
print("waits", flush=True)
while True:
    time.sleep(60)
"""


def ended(program: str) -> int:
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "waits\n"
            process.send_signal(signal.SIGTERM)
            return process.wait(60)
        finally:
            process.kill()


def test_a_wait_outside_of_python_ends() -> None:
    assert ended(WAITS_IN_C) == 0


def test_afterwards_the_handler_counts() -> None:
    assert ended(ENDS_IN_PYTHON) == 3
