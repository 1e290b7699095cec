"""Service level objectives of a request, how many requests met them, and their form on the command line. Pure."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from baton.core.errors import InvalidRequest
from baton.load.records import LoadOutcome, LoadRecord

DEFAULT_SHARE = 0.9
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_TIME = re.compile(r"(\d+(?:\.\d*)?)\s*(us|ms|s)")
_EXAMPLE = "ttft=400ms,tpot=15ms"


@dataclass(frozen=True)
class Goal:
    """Bounds of a good request; None: no bound. A rate meets the goal if `share` of its requests are good.

    Args:
        ttft_s: time to the first token.
        tpot_s: mean time per token after the first.
        gap_s: the 99th percentile of the request's own gaps between tokens.
        e2e_s: time to the end.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    gap_s: float | None = None
    e2e_s: float | None = None
    share: float = DEFAULT_SHARE

    def good(self, record: LoadRecord) -> bool:
        """Whether a request meets the bounds; one that was refused, failed or did not finish does not."""
        if record.outcome is not LoadOutcome.OK:
            return False
        return (
            _within(record.ttft_s, self.ttft_s)
            and _within(record.tpot_s, self.tpot_s)
            and (self.gap_s is None or _within(record.gap_quantile_s(0.99), self.gap_s))
            and _within(record.end_s, self.e2e_s)
        )

    def count(self, records: Iterable[LoadRecord]) -> int:
        return sum(map(self.good, records))

    def __str__(self) -> str:
        named = (("ttft", self.ttft_s), ("tpot", self.tpot_s), ("gap", self.gap_s), ("e2e", self.e2e_s))
        bounds = ", ".join(f"{name} {_shown(value)}" for name, value in named if value is not None)
        return f"{bounds} for {100 * self.share:g} %"


def parse_goal(text: str) -> list[Goal]:
    """The goals of one --slo. A bound may have several values: `ttft=400ms,tpot=10/15/20ms` is three goals.

    Raises:
        InvalidRequest: a name is not known, or a value is not a time above 0 or a share up to 100 %.
    """
    goals = [Goal()]
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name == "share":
            share = _share(text, value)
            goals = [_replaced(goal, share=share) for goal in goals]
        elif name in ("ttft", "tpot", "gap", "e2e"):
            values = _times(text, value)
            goals = [_replaced(goal, **{f"{name}_s": each}) for goal in goals for each in values]
        else:
            raise InvalidRequest(
                f"{name!r} in {text!r} is not known", field="slo", value=text,
                allowed=("ttft", "tpot", "gap", "e2e", "share"), cure=f"give such as {_EXAMPLE}",
            )  # fmt: skip
    if goals[0] == Goal(share=goals[0].share):
        raise InvalidRequest(f"{text!r} bounds nothing", field="slo", value=text, cure=f"give such as {_EXAMPLE}")
    return goals


def _replaced(goal: Goal, **values: float) -> Goal:
    return Goal(**{**vars(goal), **values})


def _times(text: str, value: str) -> list[float]:
    """The values in seconds. Values without a unit have that of the last one."""
    *others, last = value.split("/")
    unit = _TIME.fullmatch(last)
    found = [_TIME.fullmatch(each if _TIME.fullmatch(each) or not unit else each + unit[2]) for each in (*others, last)]
    seconds = [float(match[1]) * _SECONDS[match[2]] for match in found if match]
    if len(seconds) < len(found) or min(seconds) <= 0:
        raise InvalidRequest(
            f"{value!r} in {text!r} is not a time above 0", field="slo", value=text, cure=f"give such as {_EXAMPLE}"
        )
    return seconds


def _share(text: str, value: str) -> float:
    try:
        share = float(value.removesuffix("%")) / 100
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise InvalidRequest(
            f"the share {value!r} in {text!r} is not above 0 and up to 100 %", field="slo", value=text,
            cure="give such as share=90%",
        )  # fmt: skip
    return share


def _within(value: float | None, bound: float | None) -> bool:
    return bound is None or value is None or value <= bound


def _shown(seconds: float) -> str:
    return f"{seconds * 1e3:g} ms" if seconds < 1 else f"{seconds:g} s"
