"""The decode node's side of every hand-over: events in, commands out. Pure: no clock, task, socket or tensor.

One `DecodeMachine` per process: it finds the request that an event is about, and queues requests that wait for blocks.
"""

from dataclasses import dataclass

from decode_node.commands import Command
from decode_node.events import Event


@dataclass(frozen=True)
class DecodeRules:
    """What the machine needs to know of its node.

    Attributes:
        lease_s: how long a lease may stay open.
        local_prefill_tokens: a prompt with fewer uncached tokens is prefilled here.
        waiting_max: how many requests may wait for blocks.
    """

    name: str
    address: str
    incarnation: int
    lease_s: float
    local_prefill_tokens: int
    waiting_max: int


class DecodeMachine:
    """All requests of one decode node."""

    def __init__(self, rules: DecodeRules) -> None:
        self.rules = rules

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Reacts to one event. `now_s` never decreases."""
        raise NotImplementedError

    @property
    def deadline_s(self) -> float | None:
        """When `TimePassed` is due; None: no timer runs."""
        raise NotImplementedError

    @property
    def busy(self) -> bool:
        """Whether any request is live."""
        raise NotImplementedError

    @property
    def waiting(self) -> int:
        """Requests that wait for blocks."""
        raise NotImplementedError
