"""Calls between the worker processes of one gateway: what each asks of the others."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from baton.gateway.core.shared_counters import SharedCounters
from baton.gateway.observe.recent import Recent, Shown

AnswerAbout = Callable[[Mapping[str, Any], int], dict[str, Any]]
"""Answers a question of another worker; the number is the row of this one."""


class AskedWorker(Protocol):
    """The calls that other workers make to this one; implemented by `Serving`."""

    recent: Recent

    def abort_here(self, request_ids: Iterable[str], client: str | None = None) -> set[str]:
        """Ends requests in this process; only those of `client`, or of all clients if it is None."""
        ...


class OtherWorkers(Protocol):
    """Access to the other worker processes of this gateway, and to the counters that all workers share."""

    @property
    def shared_counters(self) -> SharedCounters: ...

    def join(self, serving: AskedWorker) -> None:
        """Lets the other workers' questions reach `serving` from now on."""
        ...

    async def abort(self, request_ids: Sequence[str], client: str | None) -> set[str]:
        """Ends these requests where they run on other workers; returns their ids. `client`: as in `abort_here`."""
        ...

    async def recent(self, most: int, client: str | None) -> list[list[Shown]]:
        """The result of `AskedWorker.recent.newest` on each of the other workers."""
        ...

    def answer_about(self, topic: str, answer: AnswerAbout) -> None:
        """Lets the other workers' questions about this topic reach `answer` from now on."""
        ...

    async def ask_about(self, topic: str, question: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Asks each of the other workers; returns the answers that came in time. Both are JSON of at most 16 MiB."""
        ...


class SingleWorker:
    """A gateway with a single process."""

    def __init__(self) -> None:
        self.shared_counters = SharedCounters()

    def join(self, serving: AskedWorker) -> None:
        pass

    async def abort(self, request_ids: Sequence[str], client: str | None) -> set[str]:  # noqa: ARG002
        return set()

    async def recent(self, most: int, client: str | None) -> list[list[Shown]]:  # noqa: ARG002
        return []

    def answer_about(self, topic: str, answer: AnswerAbout) -> None:
        pass

    async def ask_about(self, topic: str, question: Mapping[str, Any]) -> list[dict[str, Any]]:  # noqa: ARG002
        return []
