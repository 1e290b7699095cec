"""`baton bench`: the same as `python -m load`, flags included."""

from baton.cli.roles import Flags, become


def bench(flags: Flags = None) -> None:
    """Load a server, report latency and goodput; --help: all flags."""
    become("load", flags)
