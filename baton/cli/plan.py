"""`baton plan`: the same as `python -m baton.planner`, flags included."""

from baton.cli.roles import Flags, become


def plan(flags: Flags = None) -> None:
    """Find how many nodes a load needs; --help shows all flags."""
    become("baton.planner", flags)
