"""`baton bench`: the same as `python -m baton.load`, flags included."""

from baton.cli.roles import Flags, become


def bench(flags: Flags = None) -> None:
    """Measure latency and goodput; --help shows all flags."""
    become("baton.load", flags)
