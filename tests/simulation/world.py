"""The state that all processes of one simulation share: clock, random source, network, trace, and receivers."""

from random import Random
from typing import Protocol

from tests.simulation.clock import Clock
from tests.simulation.network import Network
from tests.simulation.scenario import Scenario
from tests.simulation.trace import Trace
from tests.simulation.transfer import Receiver


class Checked(Protocol):
    """A process with invariants of its own."""

    def check(self) -> None: ...


class World:
    """One simulation.

    Attributes:
        receivers: by incarnation of their decode node, dead nodes included.
    """

    def __init__(self, scenario: Scenario, random: Random, *, traced: bool) -> None:
        self.scenario = scenario
        self.random = random
        self.clock = Clock()
        self.network = Network(self.clock, random)
        self.trace = Trace(self.clock, wanted=traced)
        self.receivers: dict[int, Receiver] = {}
        self._touched: dict[Checked, None] = {}

    def receiver_at(self, address: str) -> Receiver | None:
        """The receiver of the decode node that lives at an address now."""
        server = self.network.servers.get(address)
        return None if server is None else self.receivers.get(server.life.incarnation)

    def touch(self, process: Checked) -> None:
        """Notes that the process has changed: its invariants are checked after this event."""
        self._touched[process] = None

    def check_touched(self) -> None:
        while self._touched:
            process, _ = self._touched.popitem()
            process.check()
