"""The scheduler's source of step costs, which may still be unknown and which learns from each ended step."""

from typing import Protocol

from baton.core.costs import StepCosts, StepWork


class Costs(Protocol):
    """A source of step costs: `baton.engine.step_meter.StepMeter`, or `NoCosts`."""

    @property
    def costs(self) -> StepCosts | None:
        """The cost model. Returns None while nothing is known."""

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learns from a step with this work that took `seconds` on the device."""


class NoCosts:
    """Knows no costs: prompts are cut by tokens only, and each step is launched at once."""

    @property
    def costs(self) -> StepCosts | None:
        return None

    def observe(self, work: StepWork, seconds: float) -> None:
        """Ignores the step."""
