"""`python -m baton.load` is `baton bench`."""

import sys

from baton.core.interrupts import plain_interrupts

if __name__ == "__main__":
    with plain_interrupts("baton bench"):
        from baton.cli.program import new_app, run
        from baton.load.command import bench

    app = new_app()
    app.command()(bench)
    run(app, sys.argv[1:], "baton bench")
