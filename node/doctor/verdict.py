"""What a check says. Knows no check."""

from dataclasses import dataclass
from enum import StrEnum


class Grade(StrEnum):
    """FAIL: a node will not work. WARN: it will work, slower or not in every setting."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Verdict:
    """One line.

    Attributes:
        check: what was looked at.
        found: what was seen, as a value with its unit.
        cure: what to do about it; empty when all is well.
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
