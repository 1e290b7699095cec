"""`python -m baton.node.doctor` is `baton doctor`."""

import sys

from baton.core.interrupts import plain_interrupts

if __name__ == "__main__":
    with plain_interrupts("baton doctor"):
        from baton.node.doctor.checks import main

    sys.exit(main())
