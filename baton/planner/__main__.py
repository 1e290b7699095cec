"""`python -m baton.planner` is `baton plan`."""

import sys

from baton.core.interrupts import plain_interrupts

if __name__ == "__main__":
    with plain_interrupts("baton plan"):
        from baton.cli.program import new_app, run
        from baton.planner.command import plan

    app = new_app()
    app.command()(plan)
    run(app, sys.argv[1:], "baton plan")
