"""What drafts have won and lost next to batches of one size, and when they rest for it. Pure.

It counts in plain steps, so that it bounds the share of time that drafts lose, whatever makes them lose: slow steps,
rejected drafts, or waits that end without drafts. Of what they win only a little counts, so that they end soon after
they stop paying.
"""

# Part of the time of plain steps that drafts may lose; plain steps that they may lose at first; and plain steps that
# they may lose after they have won some. Drafts that win a third of a step in 85 % of the cases, and lose two thirds
# in the others, would soon rest one time in twenty if they could lose only one plain step at first.
_LOST_SHARE = 0.005
_FIRST_LOST, _MOST_LOST = 3.0, 6.0
# Drafts are tried again after so many plain steps in a row, and after twice as many each time that this brings
# nothing.
_REST_STEPS = 400
_LONGEST_REST = 16 * _REST_STEPS


class Balance:
    """The account of one size of batch.

    Attributes:
        resting: whether drafts have lost what they may.
    """

    def __init__(self) -> None:
        self.resting = False
        self._steps = _FIRST_LOST
        self._plain_since = 0  # plain steps since the last drafts
        self._rest_steps = _REST_STEPS
        self._has_tried = False  # since the last rest

    def add(self, steps: float, *, drafts: bool) -> None:
        """Counts a step with drafts, or one that they made late.

        Args:
            steps: number of plain steps that it won; below 0: it lost them.
        """
        self._steps = min(_MOST_LOST, self._steps + steps)
        self._has_tried = True
        if drafts:
            self._plain_since = 0
        if self._steps <= 0.0:
            self.resting = True
        elif self._steps == _MOST_LOST:
            self._rest_steps = _REST_STEPS

    def add_plain(self) -> bool:
        """Counts a plain step that drafts did not touch. Returns whether a rest has ended with it."""
        self._steps = max(self._steps, min(_FIRST_LOST, self._steps + _LOST_SHARE))
        self._plain_since += 1
        if self._plain_since < self._rest_steps:
            return False
        if self._has_tried:
            self._rest_steps = min(2 * self._rest_steps, _LONGEST_REST)
        self._plain_since, self._has_tried, self.resting = 0, False, False
        return True
