"""The steps that were scheduled and are not over, oldest first. Pure.

The step in front runs while the one behind it is prepared, so there are two at most.
"""

from collections import deque
from typing import NamedTuple

from engine.batch import Batch, BatchRow
from engine.events import LayersComputed, RequestStarted, StepEvents
from engine.scheduling.next_step import NextStep
from engine.scheduling.state import Phase, RequestState

STEPS_MAX = 2


class Step(NamedTuple):
    """What has to be known when the step is over.

    Attributes:
        states: whose rows these are, in their order.
        started: of requests whose first row is in this step, by name.
    """

    number: int
    states: list[RequestState]
    rows: tuple[BatchRow, ...]
    started: dict[str, RequestStarted]

    def layers_computed(self, layer_stop: int) -> StepEvents:
        """What there is to tell of the step that runs, when its first layers are computed."""
        layers = []
        for state, row in zip(self.states, self.rows, strict=True):
            start = state.num_computed
            if state.request.layers_per_group and start < state.prefill_stop and state.phase is not Phase.ENDED:
                stop = start + len(row.token_ids)
                layers.append(LayersComputed(state.request_id, start, stop, layer_stop, tuple(state.blocks)))
        return StepEvents(self.number, 0.0, layers=tuple(layers))


class StepsInFlight:
    """Steps are numbered from 1 in the order of their launch, and land in that order."""

    def __init__(self) -> None:
        self._steps: deque[Step] = deque()
        self._launched = 0

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def full(self) -> bool:
        return len(self._steps) == STEPS_MAX

    @property
    def launched(self) -> int:
        """How many ever were."""
        return self._launched

    def launch(self, step: NextStep) -> Batch:
        """Puts a step behind the others."""
        assert not self.full, f"{STEPS_MAX} steps are in flight"
        assert step.number == self._launched + 1, f"step {step.number} behind {self._launched}"
        self._launched = number = step.number
        # Those in front know their places.
        for index in range(step.num_decodes, len(step.states)):
            step.states[index].row_index = index
        launched = Step(number, step.states, tuple(step.rows), step.started)
        self._steps.append(launched)
        return Batch(number, launched.rows, step.layers_per_group)

    @property
    def oldest(self) -> Step:
        """The one that runs, or is over and will land next."""
        return self._steps[0]

    def land(self) -> Step:
        """Takes the oldest step out."""
        return self._steps.popleft()

    def has_row_of(self, state: RequestState) -> bool:
        """Whether any of the steps has a row of the request."""
        return any(state in step.states for step in self._steps)

    def has_row_named(self, request_id: str) -> bool:
        """Whether any of the steps has a row of a request of that name, be it one that has ended."""
        return any(row.request_id == request_id for step in self._steps for row in step.rows)
