"""`python -m baton.load` is `baton bench`."""

import sys

from baton.cli.program import new_app, run
from baton.load.command import bench

if __name__ == "__main__":
    app = new_app()
    app.command()(bench)
    run(app, sys.argv[1:], "baton bench")
