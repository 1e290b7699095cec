"""The invariants of the design, section 4, by name, and the error that says which one does not hold."""

from typing import NoReturn

INVARIANTS = {
    "I1": "a block is free, or held by exactly the requests that its reference count says; at the end all are free",
    "I2": "no attention call reads a slot that was not written for that request in this lease generation",
    "I3": "a segment is scattered only while its lease is live, at most once, and only into that lease's blocks",
    "I4": "tokens out equal the single-process reference",
    "I5": "every request ends in exactly one of: finished, or one typed error; none waits without a deadline",
    "I6": "a node holds no peer's state after that peer's incarnation is gone",
}


class Violation(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant: str, what: str) -> None:
        self.invariant = invariant
        super().__init__(f"{invariant} ({INVARIANTS[invariant]}): {what}")


def violated(invariant: str, what: str) -> NoReturn:
    raise Violation(invariant, what)
