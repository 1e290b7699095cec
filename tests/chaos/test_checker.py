"""The checker accepts a history in which all is well, and finds each defect that is planted in it."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.chaos.checker import check
from tests.chaos.history import (
    Asked,
    Crashed,
    End,
    Ended,
    Event,
    Measured,
    NotReleased,
    NotServed,
    Over,
    PeersLeft,
    Received,
)
from tests.chaos.load import UNTYPED
from tests.chaos.scenario import ALLOWED
from tests.chaos.works import Answer

ANSWERS = {
    "one": (Answer((5, 6, 7), "abc", "length", (-0.5, -0.25, -1.0)),),
    "two": (Answer((1, 2), "xy", "stop"), Answer((3,), "z", "length")),
}
WELL: tuple[Event, ...] = (
    Measured(0.0, "d1", 10, 300.0, 50),
    Asked(1.0, 0, "one"),
    Received(1.1, 0, 0, (0, 1), (5, 6), "ab", (-0.5, -0.25)),
    Asked(1.2, 1, "two"),
    Received(1.3, 0, 0, (2,), (7,), "c", (-1.0,), "length"),
    Ended(1.3, 0, End.FINISHED, attempts=1),
    Received(1.4, 1, 1, (0,), (3,), "z", (), "length"),
    Received(1.5, 1, 0, (0, 1), (1, 2), "xy", (), "stop"),
    Ended(1.6, 1, End.FINISHED, attempts=2),
    Asked(2.0, 2, "one", cancel_after=1),
    Received(2.1, 2, 0, (0,), (5,), "a", (-0.5,)),
    Ended(2.1, 2, End.CANCELLED),
    Asked(3.0, 3, "one"),
    Received(3.1, 3, 0, (0,), (5,), "a", (-0.5,)),
    Ended(3.2, 3, End.FAILED, "NO_NODE", "NoNode: no node"),
    Asked(3.3, 4, "one", deadline_s=0.1),
    Ended(3.4, 4, End.FAILED, "DEADLINE_EXCEEDED", "DeadlineExceeded: too late"),
    Measured(9.0, "d1", 10, 310.0, 60),
    Over(9.0),
)

Change = Callable[[list[Event]], None]


def put(index: int, event: Event) -> Change:
    return lambda events: events.__setitem__(index, event)


def alter(index: int, **changes: object) -> Change:
    return lambda events: events.__setitem__(index, replace(events[index], **changes))  # type: ignore[arg-type]


def add(event: Event) -> Change:
    return lambda events: events.insert(-1, event)


def drop(index: int) -> Change:
    return lambda events: events.__delitem__(index)


PLANTED: dict[str, tuple[str, Change]] = {
    "another token": ("wrong", alter(2, token_ids=(5, 9))),
    "a lost token": ("wrong", drop(2)),
    "a token that comes twice": ("wrong", add(Received(8.0, 2, 0, (0,), (5,), "a"))),
    "a token with another place": ("wrong", alter(4, indices=(1,))),
    "two tokens that changed places": ("wrong", alter(2, token_ids=(6, 5))),
    "another text": ("wrong", alter(2, text="aB")),
    "another logprob": ("wrong", alter(2, logprobs=(-0.5, -0.3))),
    "a missing logprob": ("wrong", alter(2, logprobs=(-0.5,))),
    "an answer that ends early": ("wrong", drop(4)),
    "an answer that ends for another reason": ("wrong", alter(4, finish_reason="stop")),
    "a missing output": ("wrong", drop(6)),
    "an output that nobody asked for": ("wrong", alter(6, output=2)),
    "a wrong token before a cancellation": ("wrong", alter(10, token_ids=(6,))),
    "a wrong token before an error": ("wrong", alter(13, token_ids=(6,))),
    "a cancellation that no client made": ("wrong", alter(9, cancel_after=None)),
    "tokens after the end": ("wrong", put(5, Ended(1.25, 0, End.FINISHED))),
    "no end": ("hung", drop(5)),
    "an end that did not come": ("hung", alter(5, how=End.HUNG)),
    "an untyped error": ("untyped", alter(14, error=UNTYPED)),
    "an error that is not allowed": ("refused", alter(14, error="DATA_LOSS")),
    "a deadline that no client gave": ("refused", alter(15, deadline_s=None)),
    "a cluster that does not serve again": ("not served", add(NotServed(8.0, "g1", "one", "failed"))),
    "blocks that are not free": ("leaked", add(NotReleased(8.0, "d1", "3 leased blocks"))),
    "a pair that is not made again": ("peers", add(PeersLeft(8.0, "p1", "d1 is not paired"))),
    "a process that ends by itself": ("crashed", add(Crashed(8.0, "d1", -6))),
    "memory that grows": ("grown", alter(-2, rss_mib=900.0)),
    "files that stay open": ("grown", alter(-2, files=900)),
    "a run that stops": ("not over", drop(-1)),
}


def kinds(events: list[Event]) -> set[str]:
    return {violation.kind for violation in check(events, ANSWERS, allowed=ALLOWED)}


def test_a_history_in_which_all_is_well_has_no_violation() -> None:
    assert check(WELL, ANSWERS, allowed=ALLOWED) == []


@pytest.mark.parametrize("name", PLANTED)
def test_each_planted_defect_is_found(name: str) -> None:
    kind, change = PLANTED[name]
    events = list(WELL)
    if name == "tokens after the end":
        events[4], events[5] = events[5], events[4]
    else:
        change(events)
    assert kinds(events) == {kind}


def test_a_process_that_started_during_the_storm_may_have_any_size() -> None:
    events = [*WELL[:-2], Measured(9.0, "d1", 11, 900.0, 900), WELL[-1]]
    assert kinds(events) == set()
