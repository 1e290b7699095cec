"""`baton doctor`: replaces this process by `baton.node.doctor`, so that `baton` itself never imports torch."""

from typing import Annotated

import typer

from baton.cli.roles import become
from baton.core.limits import RATE_MAX


def doctor(
    pairs: Annotated[int, typer.Option(min=1, max=4096, help="Peers that a node on this machine will have.")] = 8,
    min_gb_per_s: Annotated[float, typer.Option(min=0, max=RATE_MAX, help="Slowest acceptable link, in GB/s.")] = 0.3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check whether this machine or pod can run a node. Prints one verdict per line; exits with 1 if a check failed."""
    shown = ["--json"] if as_json else []
    become("baton.node.doctor", [f"--pairs={pairs}", f"--min-gb-per-s={min_gb_per_s}", *shown])
