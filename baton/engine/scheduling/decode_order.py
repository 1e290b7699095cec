"""The places of decodes in a step. Pure."""

from operator import attrgetter

from baton.core.costs import StepWork
from baton.engine.scheduling.state import RequestState


class DecodeOrder:
    """Assigns each decoding request a place in the step: its place in the previous step, where possible.

    A row that keeps its place is not made or copied to the device again.

    Attributes:
        work: the decodes of the step that was placed last.
    """

    def __init__(self) -> None:
        self.work = StepWork()
        self._decoding: list[RequestState] = []
        self._placed: list[RequestState] = []
        self._members: set[RequestState] = set()

    def place(self, decoding: list[RequestState]) -> list[RequestState]:
        """Returns the requests in the order of their places. Free places go first to newcomers, then to requests that
        lost their place because the step has fewer rows. The caller must schedule all of them."""
        num_rows = len(decoding)
        if decoding != self._decoding:
            self._decoding = decoding
            self._keep_places(decoding)
            self.work = StepWork(num_rows, sum([state.num_scheduled for state in decoding]) + num_rows)
        elif num_rows:  # each context has grown by one token
            self.work = StepWork(num_rows, self.work.keys + num_rows)
        return self._placed

    def _keep_places(self, decoding: list[RequestState]) -> None:
        known, self._members = self._members, set(decoding)
        num_rows, before = len(decoding), self._placed
        filling = sorted(self._members - known, key=attrgetter("place"))
        filling += [state for state in before[num_rows:] if state in self._members]
        self._placed = before[:num_rows]
        free = sorted(state.row_index for state in known - self._members if state.row_index < num_rows)
        for place, state in zip(free, filling[: len(free)], strict=True):
            self._placed[place] = state
        self._placed += filling[len(free) :]
