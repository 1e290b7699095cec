"""Judges a history: pure, so that it can be tested with histories that are wrong in known ways."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

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
from tests.chaos.load import UNTYPED, joined
from tests.chaos.works import Answer

# What a process may grow by that lives through the whole storm: connections, peers, caches that fill.
FILES_MORE, MIB_MORE = 150, 150.0
_LOGPROB_ERROR = 1e-3


@dataclass(frozen=True)
class Violation:
    """A defect that a history shows.

    Attributes:
        kind: "wrong", "hung", "untyped", "refused", "leaked", "crashed", "peers", "not served", "grown" or "not over".
    """

    kind: str
    at_s: float
    text: str


def check(
    events: Sequence[Event], answers: Mapping[str, tuple[Answer, ...]], *, allowed: AbstractSet[str]
) -> list[Violation]:
    """Everything that must not be in a history, in order of time.

    Args:
        answers: of one process, by the name of the work.
        allowed: errors that a request may end with, besides its own deadline's.
    """
    received: dict[int, dict[int, list[Received]]] = defaultdict(lambda: defaultdict(list))
    asked: dict[int, Asked] = {}
    ended: dict[int, Ended] = {}
    found: list[Violation] = []
    for event in events:
        match event:
            case Asked():
                asked[event.request] = event
            case Received():
                if event.request in ended:
                    found.append(Violation("wrong", event.at_s, f"request {event.request} got tokens after its end"))
                received[event.request][event.output].append(event)
            case Ended():
                ended[event.request] = event
            case Crashed():
                text = f"{event.process} ended with {event.code}: {event.detail}"
                found.append(Violation("crashed", event.at_s, text))
            case NotReleased():
                found.append(Violation("leaked", event.at_s, f"{event.process} holds {event.what}"))
            case NotServed():
                text = f"{event.gateway} did not serve {event.work}: {event.how}"
                found.append(Violation("not served", event.at_s, text))
            case PeersLeft():
                found.append(Violation("peers", event.at_s, f"{event.process}: {event.what}"))
    for number, request in asked.items():
        found += _check_request(request, received[number], ended.get(number), answers[request.work], allowed)
    found += _grown([event for event in events if isinstance(event, Measured)])
    if not any(isinstance(event, Over) for event in events):
        found.append(Violation("not over", events[-1].at_s if events else 0.0, "the run did not come to its end"))
    return sorted(found, key=lambda violation: violation.at_s)


def _check_request(
    asked: Asked,
    received: Mapping[int, Sequence[Received]],
    ended: Ended | None,
    answers: Sequence[Answer],
    allowed: AbstractSet[str],
) -> list[Violation]:
    name = f"request {asked.request} ({asked.work})"
    if ended is None or ended.how is End.HUNG:
        return [Violation("hung", asked.at_s, f"{name} did not end")]
    wrong = [
        Violation("wrong", ended.at_s, f"{name}, output {index}: {text}")
        for index, pieces in received.items()
        if (text := _wrong_in(pieces, answers[index] if index < len(answers) else None, whole=_is_whole(ended)))
    ]
    if _is_whole(ended) and (missing := set(range(len(answers))) - received.keys()):
        wrong.append(Violation("wrong", ended.at_s, f"{name}: nothing of outputs {sorted(missing)}"))
    if ended.how is End.CANCELLED and asked.cancel_after is None:
        wrong.append(Violation("wrong", ended.at_s, f"{name} was cancelled, but not by its client"))
    if ended.how is End.FAILED:
        wrong += _check_error(name, asked, ended, allowed)
    return wrong


def _check_error(name: str, asked: Asked, ended: Ended, allowed: AbstractSet[str]) -> list[Violation]:
    if ended.error == UNTYPED:
        return [Violation("untyped", ended.at_s, f"{name}: {ended.detail}")]
    if ended.error == "DEADLINE_EXCEEDED" and asked.deadline_s is not None:
        return []
    if ended.error not in allowed:
        return [Violation("refused", ended.at_s, f"{name} failed: {ended.detail}")]
    return []


def _is_whole(ended: Ended) -> bool:
    return ended.how is End.FINISHED


def _wrong_in(pieces: Sequence[Received], answer: Answer | None, *, whole: bool) -> str:
    """What is wrong in one output, as far as the client has it; empty: nothing."""
    if answer is None:
        return "nobody asked for it"
    indices = [index for piece in pieces for index in piece.indices]
    if indices != list(range(len(indices))):
        return f"tokens are lost or come twice: their places are {indices}"
    has = joined({0: pieces})[0]
    count = len(has.token_ids)
    if has.token_ids != answer.token_ids[:count]:
        return f"tokens {has.token_ids}, but one process has {answer.token_ids}"
    if not answer.text.startswith(has.text):
        return f"text {has.text!r}, but one process has {answer.text!r}"
    if len(has.logprobs) not in (0, count) or not _near(has.logprobs, answer.logprobs):
        return f"logprobs {has.logprobs}, but one process has {answer.logprobs}"
    if whole and (count, has.text) != (len(answer.token_ids), answer.text):
        return f"it ends after {count} tokens and {has.text!r}, one process after {len(answer.token_ids)}"
    if whole and has.finish_reason != answer.finish_reason:
        return f"it finished by {has.finish_reason!r}, but one process by {answer.finish_reason!r}"
    return ""


def _near(logprobs: Sequence[float], expected: Sequence[float]) -> bool:
    return all(math.isclose(one, other, abs_tol=_LOGPROB_ERROR) for one, other in zip(logprobs, expected, strict=False))


def _grown(measured: Sequence[Measured]) -> list[Violation]:
    """Processes that have lived through the whole storm, and hold much more than before it."""
    lives: dict[tuple[str, int], list[Measured]] = defaultdict(list)
    for event in measured:
        lives[event.process, event.pid].append(event)
    if not measured:
        return []
    first_s, last_s = measured[0].at_s, measured[-1].at_s
    found = []
    for (process, _), life in lives.items():
        first, last = life[0], life[-1]
        # Processes are measured together, within a moment.
        if first.at_s - first_s > 1 or last_s - last.at_s > 1:
            continue
        if last.files - first.files > FILES_MORE or last.rss_mib - first.rss_mib > MIB_MORE:
            text = f"{process}: {first.rss_mib:.0f} to {last.rss_mib:.0f} MiB, {first.files} to {last.files} files"
            found.append(Violation("grown", last.at_s, text))
    return found
