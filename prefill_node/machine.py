"""The prefill node's side of every hand-over: events in, commands out. Pure: no clock, task, socket or tensor.

KV of a chunk is sent while the next chunk computes. A call ends only after its blocks are free and nothing of its lease
is in flight.
"""

from dataclasses import dataclass

from prefill_node.commands import Command
from prefill_node.events import Event


@dataclass(frozen=True)
class PrefillRules:
    """What the machine needs to know of its node."""

    name: str
    num_layers: int


class PrefillMachine:
    """All Prefill calls of one prefill node."""

    def __init__(self, rules: PrefillRules) -> None:
        self.rules = rules

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Reacts to one event. `now_s` never decreases."""
        raise NotImplementedError

    @property
    def deadline_s(self) -> float | None:
        """When a timer event would be due. No call has one of its own: gateways end calls that take too long."""
        return None

    @property
    def busy(self) -> bool:
        """Whether any call is live."""
        raise NotImplementedError
