"""Sums up many runs: counts, times until the cluster answered again, and the page that shows them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from tests.chaos.checker import Violation
from tests.chaos.history import Asked, DiedAt, End, Ended, Event, FaultBegan, Received
from tests.chaos.scenario import Scenario


@dataclass
class Round:
    """One run in numbers.

    Attributes:
        cluster: its size and policy, for people.
        ends: requests by how they ended; failed ones by their error.
        retried: requests that took more than one attempt.
        broken_off: requests that failed with a typed error other than a deadline's when they had tokens already.
        violations: by kind.
        answered_s: by kind of fault: the times from each fault's begin until a request that was sent afterwards was
            answered in full.
        steps: of the hand-over at which nodes died, and how often.
    """

    seed: int
    seconds: float
    cluster: str
    requests: int
    tokens: int
    ends: dict[str, int]
    retried: int
    broken_off: int
    violations: dict[str, int]
    answered_s: dict[str, list[float]] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)


def round_of(scenario: Scenario, events: Sequence[Event], violations: Sequence[Violation]) -> Round:
    ended = [event for event in events if isinstance(event, Ended)]
    begun = {event.request for event in events if isinstance(event, Received)}
    ends = Counter(event.error if event.how is End.FAILED else event.how.value for event in ended)
    return Round(
        seed=scenario.seed,
        seconds=scenario.seconds,
        cluster=f"{len(scenario.prefills)}P {len(scenario.decodes)}D {len(scenario.gateways)}G, {scenario.policy}",
        requests=sum(isinstance(event, Asked) for event in events),
        tokens=sum(len(event.token_ids) for event in events if isinstance(event, Received)),
        ends=dict(ends),
        retried=sum(event.attempts > 1 for event in ended),
        broken_off=sum(
            event.how is End.FAILED and event.error != "DEADLINE_EXCEEDED" and event.request in begun for event in ended
        ),
        violations=dict(Counter(violation.kind for violation in violations)),
        answered_s=_answered_s(events),
        steps=dict(Counter(event.step for event in events if isinstance(event, DiedAt))),
    )


def _answered_s(events: Sequence[Event]) -> dict[str, list[float]]:
    asked_s = {event.request: event.at_s for event in events if isinstance(event, Asked)}
    answers = [
        (asked_s[event.request], event.at_s)
        for event in events
        if isinstance(event, Ended) and event.how is End.FINISHED
    ]
    found: dict[str, list[float]] = {}
    for fault in events:
        if isinstance(fault, FaultBegan):
            later = [ended_s for begun_s, ended_s in answers if begun_s >= fault.at_s]
            found.setdefault(fault.kind, []).append(min(later) - fault.at_s if later else float("inf"))
    return found


def page(rounds: Sequence[Round], soak: Sequence[Any], *, machine: str) -> str:
    """The report in Markdown."""
    steps = _counts(_sum(each.steps for each in rounds))
    lines = [
        "# Chaos",
        "",
        "Real processes on one machine, the demo Llama in fp32 on CPUs, a client of two gateways. Each round starts a "
        "cluster and is replayed by `make chaos SEED=its seed MINUTES=its minutes`.",
        "",
        machine,
        "",
        *_totals(rounds),
        "",
        "## Faults",
        "",
        "Several are under way at once. A fault is over for clients when a request that was sent after the fault's "
        "begin has its whole answer: what a new request waits at worst.",
        "",
        "| fault | times | answered again after, median | longest |",
        "|---|---|---|---|",
        *_fault_rows(rounds),
        "",
        *([f"Deaths at a step of the hand-over: {steps}.", ""] if steps else []),
        "## Rounds",
        "",
        "| seed | cluster | seconds | requests | finished | retried | cancelled | past deadline | refused | wrong |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(_round_row(each) for each in rounds),
    ]
    if soak:
        lines += ["", "## Soak", "", *_soak_lines(soak)]
    return "\n".join(lines) + "\n"


def _totals(rounds: Sequence[Round]) -> list[str]:
    ends = Counter(_sum(each.ends for each in rounds))
    violations = Counter(_sum(each.violations for each in rounds))
    refused = {name: count for name, count in ends.items() if name.isupper() and name != "DEADLINE_EXCEEDED"}
    names = {
        "wrong": "answers with a wrong, lost or repeated token", "hung": "requests without an end",
        "untyped": "untyped errors", "refused": "errors that the scenario does not allow",
        "leaked": "nodes with blocks, leases or requests left", "crashed": "processes that ended by themselves",
        "peers": "nodes with a peer neither ready nor forgotten", "not served": "works not served after a storm",
        "grown": "surviving processes that grew",
    }  # fmt: skip
    return [
        "| what | count |",
        "|---|---|",
        f"| minutes of storm | {sum(each.seconds for each in rounds) / 60:.0f} |",
        f"| faults | {sum(len(times) for each in rounds for times in each.answered_s.values())} |",
        f"| requests | {sum(each.requests for each in rounds)} |",
        f"| tokens received and compared | {sum(each.tokens for each in rounds)} |",
        f"| finished | {ends['finished']} |",
        f"| of them after more than one attempt | {sum(each.retried for each in rounds)} |",
        f"| cancelled by the client | {ends['cancelled']} |",
        f"| past the client's deadline | {ends['DEADLINE_EXCEEDED']} |",
        f"| refused with a typed error | {sum(refused.values())} ({_counts(refused)}) |",
        f"| of them after the first token | {sum(each.broken_off for each in rounds)} |",
        *(f"| **{text}** | **{violations[name]}** |" for name, text in names.items()),
    ]


def _sum(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total = Counter[str]()
    for each in counts:
        total.update(each)
    return dict(total)


def _fault_rows(rounds: Sequence[Round]) -> list[str]:
    times: dict[str, list[float]] = {}
    for each in rounds:
        for kind, found in each.answered_s.items():
            times.setdefault(kind, []).extend(found)
    return [
        f"| {kind.replace('_', ' ')} | {len(found)} | {median(found):.2f} s | {max(found):.2f} s |"
        for kind, found in sorted(times.items())
    ]


def _round_row(each: Round) -> str:
    refused = {name: count for name, count in each.ends.items() if name.isupper() and name != "DEADLINE_EXCEEDED"}
    cells = (
        each.seed, each.cluster, f"{each.seconds:.0f}", each.requests, each.ends.get("finished", 0), each.retried,
        each.ends.get("cancelled", 0), each.ends.get("DEADLINE_EXCEEDED", 0), sum(refused.values()),
        _counts(each.violations) or "none",
    )  # fmt: skip
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _soak_lines(soak: Sequence[Any]) -> list[str]:
    return [
        "A light load, and processes that are killed and drained in turn. Slopes are over all samples after the first "
        "third, of the processes that live through all of it.",
        "",
        "| process | minutes | restarts of others | memory at the end | slope per restart | open files at the end | "
        "slope per restart | flat |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| {each['process']} | {each['minutes']:.0f} | {each['restarts']} | {each['rss_mib']:.0f} MiB | "
            f"{each['mib_per_restart']:+.2f} MiB | {each['files']} | {each['files_per_restart']:+.2f} | "
            f"{'yes' if each['flat'] else '**no**'} |"
            for each in soak
        ),
    ]


def to_json(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    return [asdict(each) for each in rounds]


def from_json(items: Sequence[dict[str, Any]]) -> list[Round]:
    return [Round(**item) for item in items]
