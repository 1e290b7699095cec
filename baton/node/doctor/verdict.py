"""The outcome of one check."""

from dataclasses import dataclass
from enum import StrEnum


class Grade(StrEnum):
    """The grade of a check. With FAIL a node will not work; with WARN it works, but slower or not in every setting."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Verdict:
    """The outcome of one check, which is one line of output.

    Attributes:
        check: the thing that was checked.
        found: the value found, with its unit.
        cure: how to mend it; empty for OK.
    """

    check: str
    grade: Grade
    found: str
    cure: str = ""


def ok(check: str, found: str) -> Verdict:
    return Verdict(check, Grade.OK, found)


def warn(check: str, found: str, cure: str) -> Verdict:
    return Verdict(check, Grade.WARN, found, cure)


def fail(check: str, found: str, cure: str) -> Verdict:
    return Verdict(check, Grade.FAIL, found, cure)
