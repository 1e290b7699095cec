"""`baton doctor`: runs the checks of `node.doctor` in a process of their own, so that this program needs no torch."""

import subprocess
import sys
from typing import Annotated

import typer


def doctor(
    pairs: Annotated[int, typer.Option(min=1, help="Peers that a node here will have.")] = 8,
    min_gb_per_s: Annotated[float, typer.Option(min=0, help="Slowest link that will do, in GB/s.")] = 0.3,
) -> None:
    """Check whether this machine, or this pod, can run a node; one verdict per line."""
    command = [sys.executable, "-m", "node.doctor", f"--pairs={pairs}", f"--min-gb-per-s={min_gb_per_s}"]
    raise typer.Exit(subprocess.run(command, check=False).returncode)
