"""`python -m baton.node.doctor` is `baton doctor`."""

from baton.core.exits import exit_at_once
from baton.core.interrupts import plain_interrupts

if __name__ == "__main__":
    with plain_interrupts("baton doctor"):
        from baton.node.doctor.checks import main

        code = main()
    exit_at_once(code)  # the interpreter's own exit takes torch a second and more
