"""How soon a thread of a node gets Python's lock from another thread that is busy."""

import sys

# NOTE: with Python's default of 5 ms, which is about a decode step, the thread that passes a step's tokens on waits for
# nearly a step whenever another thread is busy. Of 50 gaps over 7 ms of a decode node with steps of 5.6 ms, 37 were of
# steps whose end was seen late, while a thread that wanted the lock every millisecond waited 4 to 5 ms for it 29 times
# (bench/results/served.md). Two threads that only compute lose 1 % of their work per CPU second at 0.5 ms, 5 % at 0.1.
SWITCH_INTERVAL_S = 0.0005


def pass_lock_sooner() -> None:
    """Lets a thread that waits for the lock have it after SWITCH_INTERVAL_S. Applies to all threads of the process."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
