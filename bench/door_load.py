"""The streams of one round of `bench.http_door`, when their messages came, and a client that reads one over HTTP."""

import asyncio
import statistics
import time
from dataclasses import dataclass, field
from typing import cast

import orjson

from bench.scripted_decode import FIRST_STEP_S


@dataclass(frozen=True)
class Pace:
    """What the scripted node does in one round: each step has a token for each stream."""

    name: str
    streams: int
    output_tokens: int
    step_s: float

    @property
    def work(self) -> str:
        return f"{self.streams} streams, a step each {1e3 * self.step_s:.1f} ms, {self.output_tokens} tokens out"


@dataclass
class Stream:
    """When the messages of one stream came."""

    first_s: float = 0.0
    last_s: float = 0.0
    messages: int = 0
    longest_s: float = 0.0  # between two messages

    @property
    def span_s(self) -> float:
        """Without the pause before the second step, which is the node's."""
        return self.last_s - self.first_s - FIRST_STEP_S

    def came(self, messages: int) -> None:
        now_s = time.monotonic()
        if self.messages:
            self.longest_s = max(self.longest_s, now_s - self.last_s)
        else:
            self.first_s = now_s
        self.last_s = now_s
        self.messages += messages


@dataclass
class Load:
    """What all clients of one round have received."""

    pace: Pace
    streams: list[Stream] = field(default_factory=list)
    begun: int = 0
    own_pause_s: float = 0.0  # the longest of the clients' process
    all_begun: asyncio.Event = field(default_factory=asyncio.Event)

    def stream(self) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    def begins(self) -> None:
        self.begun += 1
        if self.begun == self.pace.streams:
            now_s = time.monotonic()
            for stream in self.streams:  # the pause before the second step is the node's
                stream.last_s, stream.longest_s = now_s + FIRST_STEP_S, 0.0
            self.all_begun.set()

    @property
    def messages(self) -> int:
        return sum(stream.messages for stream in self.streams)

    @property
    def longest_pauses_s(self) -> list[float]:
        """Of each stream, in ascending order."""
        return sorted(stream.longest_s for stream in self.streams)

    @property
    def mean_pause_s(self) -> float:
        return statistics.fmean(stream.span_s / max(1, stream.messages - 1) for stream in self.streams)

    @property
    def fairness(self) -> float:
        """All streams get equally many tokens: the time until the first one has all, over that of the last one."""
        spans_s = [stream.span_s for stream in self.streams]
        return min(spans_s) / max(spans_s)


class SseClient(asyncio.Protocol):
    """One streamed completion; counts chunks and parses nothing else."""

    def __init__(self, path: str, body: dict[str, object], load: Load) -> None:
        data = orjson.dumps(body)
        headers = f"host: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        head = f"POST {path} HTTP/1.1\r\n{headers}"
        self._request = head.encode() + data
        self._load, self._stream = load, load.stream()
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        begun = self._stream.messages > 0
        if chunks := data.count(b"data: {"):
            self._stream.came(chunks)
            if not begun:
                self._load.begins()
        if b"data: [DONE]" in data or data.startswith(b"HTTP/1.1 4"):
            assert begun, data
            self._transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
