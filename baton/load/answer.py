"""The answer to one request as it arrives: an asker reports its messages and its end, and a worker records it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol

from baton.load.workload import PlannedRequest


class AskError(Exception):
    """The server, or the way to it, did not answer the request.

    Args:
        kind: one word or a status, by which errors are counted.
        refused: whether the server has no room now.
    """

    def __init__(self, kind: str, detail: str, *, refused: bool = False) -> None:
        self.kind = kind
        self.detail = detail
        self.refused = refused
        super().__init__(f"{kind}: {detail}")


@dataclass
class LoadAnswer:
    """One answer, which grows while messages arrive. Times are those of `time.monotonic`."""

    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    exact: bool = True
    usage: Mapping[str, int] = field(default_factory=dict)
    receipt: Mapping[str, Any] = field(default_factory=dict)

    def add(self, tokens: int) -> None:
        """Records that a message with `tokens` tokens has just arrived."""
        self.times.append(monotonic())
        self.counts.append(tokens)


class Asker(Protocol):
    """Sends requests to one target, any number at once. Its maker closes it."""

    def prepare(self, request: PlannedRequest) -> Any:
        """Encodes a request, before it is due, in the form in which it is sent."""

    async def ask(self, prepared: Any, answer: LoadAnswer) -> None:
        """Sends a request, and returns when the answer has ended.

        Raises:
            AskError: the answer is missing or incomplete.
        """

    async def close(self) -> None: ...
