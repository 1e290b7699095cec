"""Python's lock in node processes."""

import sys

from baton.core.interpreter_lock import SWITCH_INTERVAL_S, pass_lock_sooner


def test_threads_pass_the_lock_within_a_fraction_of_a_step() -> None:
    before_s = sys.getswitchinterval()
    try:
        pass_lock_sooner()
        assert sys.getswitchinterval() == SWITCH_INTERVAL_S
    finally:
        sys.setswitchinterval(before_s)
