"""What the scheduler knows of step costs: a model that may still be unknown, and that learns from each ended step."""

from typing import Protocol

from baton.core.costs import StepCosts, StepWork


class Costs(Protocol):
    """A source of step costs: `baton.engine.step_meter.StepMeter`, or `NoCosts`."""

    @property
    def costs(self) -> StepCosts | None:
        """None: nothing is known yet."""

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step with this work has taken so long on the device."""


class NoCosts:
    """Never knows anything: prompts are cut by tokens only, and each step is launched at once."""

    @property
    def costs(self) -> StepCosts | None:
        return None

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learns nothing."""
