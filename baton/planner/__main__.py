"""`python -m baton.planner` is `baton plan`."""

import sys

from baton.cli.program import new_app, run
from baton.planner.command import plan

if __name__ == "__main__":
    app = new_app()
    app.command()(plan)
    run(app, sys.argv[1:], "baton plan")
