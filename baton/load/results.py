"""The results of runs, and the JSON that keeps them: every request, and the version of the form."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from baton.cli.output import write_output
from baton.core.errors import InvalidRequest
from baton.core.regular_file import read_regular_file
from baton.core.version import __version__
from baton.load.goals import Goal
from baton.load.metrics import SPREADS, Spread, Summary, summarize
from baton.load.records import LoadOutcome, LoadRecord

SCHEMA = "baton-bench/1"
_FILE_BYTES_MAX = 4 << 30  # the times of each token, of millions of requests


@dataclass(frozen=True)
class ClientReport:
    """Whether the client kept up.

    Args:
        late_p99_s: how late requests were sent.
        lag_p99_s: how late event loops ran timers; of the busiest process, like `cpu_share`, the share of one core.
        bound_s: late_p99_s and lag_p99_s above it mean that the client was the limit.
    """

    processes: int
    late_p99_s: float
    lag_p99_s: float
    cpu_share: float
    bound_s: float

    @property
    def was_the_limit(self) -> bool:
        return max(self.late_p99_s, self.lag_p99_s) > self.bound_s

    def __str__(self) -> str:
        line = (
            f"{self.processes} client process{'es' if self.processes > 1 else ''}, "
            f"requests sent {_ms(self.late_p99_s)} late (p99), event loops {_ms(self.lag_p99_s)} late (p99), "
            f"busiest {100 * self.cpu_share:.0f} % of a core"
        )
        if not self.was_the_limit:
            return line
        return (
            f"the client was the limit: {line}, where {_ms(self.bound_s)} is allowed; raise --processes, or run it on "
            "another machine with free cores"
        )


@dataclass(frozen=True)
class Kept:
    """The part of a run that is kept without its records; `good` has a count for each goal of the results."""

    summary: Summary
    good: tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """One run against one target.

    Args:
        api: the API that was used.
        rate: requests per second as planned.
        notes: remarks for the reader.
        kept: replaces `records`, which are empty then: a search has too many to keep.
    """

    label: str
    address: str
    api: str
    model: str
    workload: str
    rate: float
    seed: int
    started: str  # UTC, ISO 8601
    client: ClientReport
    records: Sequence[LoadRecord]
    notes: tuple[str, ...] = ()
    kept: Kept | None = None

    @property
    def counted(self) -> list[LoadRecord]:
        return [record for record in self.records if record.counted]

    @property
    def summary(self) -> Summary:
        return summarize(self.records) if self.kept is None else self.kept.summary

    def good(self, goals: Sequence[Goal]) -> list[int]:
        """The number of requests that met each goal; without records, `goals` must be those of the results."""
        return [goal.count(self.counted) for goal in goals] if self.kept is None else list(self.kept.good)

    def without_records(self, goals: Sequence[Goal]) -> "Run":
        return replace(self, records=(), kept=Kept(self.summary, tuple(self.good(goals))))


@dataclass(frozen=True)
class Found:
    """The answer of a search: the highest rate that meets a goal.

    Args:
        good_share: share of good requests at that rate.
        requests: number of requests in that share.
        complete: whether the search ended by itself, with a confirmed rate.
        at_most: whether a higher rate was tried and failed.
        client_limited: runs in which the client was the limit.
    """

    label: str
    goal: Goal
    rate: float
    good_share: float
    requests: int
    complete: bool
    at_most: bool
    client_limited: int = 0


@dataclass(frozen=True)
class LoadResults:
    """The measurements of one call of the command; `stopped` if a signal ended them early."""

    runs: Sequence[Run]
    goals: Sequence[Goal] = ()
    found: Sequence[Found] = ()
    command: str = ""
    version: str = field(default=__version__)
    stopped: bool = False

    @property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(run.label for run in self.runs))

    def write(self, path: Path) -> None:
        """Writes the results as JSON."""
        write_output(path, json.dumps(to_json(self), separators=(",", ":")) + "\n", field="json")


def to_json(results: LoadResults) -> dict[str, Any]:
    """The results in the form of `SCHEMA`. Times of requests are in milliseconds, with two decimals."""
    return {
        "schema": SCHEMA,
        "baton": results.version,
        "command": results.command,
        "goals": [asdict(goal) for goal in results.goals],
        "found": [asdict(found) for found in results.found],
        "runs": [_run_to_json(run, results.goals) for run in results.runs],
    }


def read_results(path: Path) -> LoadResults:
    """Reads what `LoadResults.write` wrote.

    Raises:
        InvalidRequest: the file is something else, or of another version.
    """
    try:
        found = json.loads(read_regular_file(path, bytes_max=_FILE_BYTES_MAX))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}", field="results", value=path) from None
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != SCHEMA:
        raise InvalidRequest(
            f"{path} has the schema {schema!r}", field="results", value=path, allowed=(SCHEMA,),
            cure="measure again with this version of `baton bench --json`",
        )  # fmt: skip
    try:
        return LoadResults(
            runs=[_run_from_json(run) for run in found["runs"]],
            goals=[Goal(**goal) for goal in found["goals"]],
            found=[Found(**{**each, "goal": Goal(**each["goal"])}) for each in found["found"]],
            command=found["command"],
            version=found["baton"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(f"{path} is damaged: {error!r}", field="results", value=path) from None


def relabelled(results: LoadResults, label: str) -> LoadResults:
    return replace(
        results,
        runs=[replace(run, label=label) for run in results.runs],
        found=[replace(found, label=label) for found in results.found],
    )


_RUN = ("label", "address", "api", "model", "workload", "rate", "seed", "started")


def _run_to_json(run: Run, goals: Sequence[Goal]) -> dict[str, Any]:
    return {
        **{name: getattr(run, name) for name in _RUN},
        "notes": list(run.notes),
        "client": {**asdict(run.client), "was_the_limit": run.client.was_the_limit},
        "summary": asdict(run.summary),
        "good": run.good(goals),
        "requests": [_record_to_json(record) for record in run.records],
    }


def _run_from_json(found: Mapping[str, Any]) -> Run:
    client = {each.name: found["client"][each.name] for each in fields(ClientReport)}
    return Run(
        **{name: found[name] for name in _RUN},
        notes=tuple(found["notes"]),
        client=ClientReport(**client),
        records=tuple(_record_from_json(each) for each in found["requests"]),
        kept=None if found["requests"] else Kept(_summary_from_json(found["summary"]), tuple(found["good"])),
    )


def _summary_from_json(found: Mapping[str, Any]) -> Summary:
    spreads = {name: None if found[name] is None else Spread(**found[name]) for name in SPREADS}
    return Summary(**{**found, **spreads})


def _record_to_json(record: LoadRecord) -> dict[str, Any]:
    return {
        "id": record.request_id,
        "index": record.index,
        "counted": record.counted,
        "outcome": record.outcome.value,
        "error": record.error,
        "detail": record.detail,
        "due_ms": _to_ms(record.due_s),
        "late_ms": _to_ms(record.late_s),
        "end_ms": _to_ms(record.end_s),
        "ttft_ms": None if record.ttft_s is None else _to_ms(record.ttft_s),
        "tpot_ms": None if record.tpot_s is None else _to_ms(record.tpot_s),
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "tokens": record.tokens,
        "exact": record.exact,
        "times_ms": [_to_ms(moment) for moment in record.times_s],
        "counts": list(record.counts) if any(count != 1 for count in record.counts) else None,
        "usage": dict(record.usage),
        "receipt": dict(record.receipt),
    }


def _record_from_json(found: Mapping[str, Any]) -> LoadRecord:
    times = tuple(moment / 1e3 for moment in found["times_ms"])
    return LoadRecord(
        index=found["index"],
        due_s=found["due_ms"] / 1e3,
        late_s=found["late_ms"] / 1e3,
        prompt_tokens=found["prompt_tokens"],
        output_tokens=found["output_tokens"],
        outcome=LoadOutcome(found["outcome"]),
        end_s=found["end_ms"] / 1e3,
        error=found["error"],
        detail=found["detail"],
        times_s=times,
        counts=tuple(found["counts"] or [1] * len(times)),
        usage=found["usage"],
        exact=found["exact"],
        request_id=found["id"],
        receipt=found["receipt"],
        counted=found["counted"],
    )


def _to_ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def combined_results(names: Sequence[str], goals: Sequence[Goal]) -> LoadResults:
    """The results of several files, each under one label: the given one, or the file's name.

    Raises:
        InvalidRequest: a file is not of `baton bench`, or has several deployments.
    """
    every = []
    for name in names:
        label, path = name.split("=", 1) if "=" in name else (Path(name).stem, name)
        found = read_results(Path(path))
        every.append(found if len(names) == 1 else relabelled(found, label))
        if len(names) > 1 and len(found.labels) > 1:
            raise InvalidRequest(
                f"{path} has the deployments {', '.join(found.labels)}", field="results", value=path,
                cure="compare files of one deployment each",
            )  # fmt: skip
    runs = [run for results in every for run in results.runs]
    searched = [found for results in every for found in results.found]
    of_files = {tuple(results.goals) for results in every}
    if searched and (goals or len(of_files) > 1):
        raise InvalidRequest(
            "searches keep what they searched for", field="slo", cure="compare files of equal --slo, and give none"
        )
    return LoadResults(runs, goals or every[0].goals, searched, every[0].command, every[0].version)
