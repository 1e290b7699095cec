"""The answer to one request as it comes: an asker reports messages and the end, a worker makes the record of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol

from baton.load.workload import PlannedRequest


class AskError(Exception):
    """The server, or the way to it, did not answer the request.

    Args:
        kind: one word or a status, by which errors are counted.
        refused: the server has no room now.
    """

    def __init__(self, kind: str, detail: str, *, refused: bool = False) -> None:
        self.kind = kind
        self.detail = detail
        self.refused = refused
        super().__init__(f"{kind}: {detail}")


@dataclass
class LoadAnswer:
    """Grows while messages come. Times are those of `time.monotonic`."""

    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    exact: bool = True
    usage: Mapping[str, int] = field(default_factory=dict)
    receipt: Mapping[str, Any] = field(default_factory=dict)

    def add(self, tokens: int) -> None:
        """A message with that many tokens has come now."""
        self.times.append(monotonic())
        self.counts.append(tokens)


class Asker(Protocol):
    """Sends requests to one target, any number at once. Closed by whoever made it."""

    def prepare(self, request: PlannedRequest) -> Any:
        """The request in the form in which it is sent; made before it is due."""

    async def ask(self, prepared: Any, answer: LoadAnswer) -> None:
        """Sends it, and returns when the answer has ended.

        Raises:
            AskError: there is none, or not all of it.
        """

    async def close(self) -> None: ...
