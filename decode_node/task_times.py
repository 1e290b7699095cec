"""The clock of one request on the decode node: when its steps happened, for its trace, and when it must end. Pure."""

import heapq

from baton.engine.events import ChunkComputed
from baton.protos.internal.v1 import decode_pb2 as pb

_CHUNKS_MAX = 64


class TaskTimes:
    """The times of one request. Traces get them as seconds since the request arrived, if the gateway traces it.

    Attributes:
        budget_s: maximum duration of the whole request; None: no limit.
        max_queue_s: how long it may wait for blocks; 0: not at all.
        phase_deadline_s: when its present phase must be over; None: no limit.
        queued_s: how long it has waited for blocks.
        filled_s, handed_over_s: when all KV of its lease was here, and when its hand-over came.
    """

    def __init__(self, submit: pb.SubmitRequest, now_s: float) -> None:
        self.submitted_s = self.filled_s = now_s
        self.handed_over_s = self.queued_s = 0.0
        self.chunks = ChunkTimes()
        self.budget_s = submit.budget_s if submit.HasField("budget_s") else None
        self.max_queue_s = submit.max_queue_s if submit.HasField("max_queue_s") else 0.0
        self.phase_deadline_s = now_s + self.max_queue_s if self.max_queue_s > 0 else None
        self._budget_deadline_s = None if self.budget_s is None else now_s + self.budget_s
        self._traced = bool(submit.traceparent)

    @property
    def deadline_s(self) -> float | None:
        deadlines = [at_s for at_s in (self._budget_deadline_s, self.phase_deadline_s) if at_s is not None]
        return min(deadlines, default=None)

    def budget_is_over(self, now_s: float) -> bool:
        return self._budget_deadline_s is not None and now_s >= self._budget_deadline_s

    def trace_accepted(self, accepted: pb.Accepted, now_s: float) -> None:
        if self._traced:
            accepted.at_s = now_s - self.submitted_s

    def trace_reserved(self, reserved: pb.Reserved, now_s: float) -> None:
        if self._traced:
            reserved.at_s = now_s - self.submitted_s

    def trace_admitted(self, admitted: pb.Admitted, now_s: float) -> None:
        if self._traced:
            admitted.at_s = now_s - self.submitted_s
            admitted.filled_s = self.filled_s - self.submitted_s
            admitted.handed_over_s = self.handed_over_s - self.submitted_s

    def trace_chunk(self, chunk: ChunkComputed, now_s: float) -> None:
        if self._traced:
            self.chunks.add(chunk.token_start, chunk.token_stop, now_s - self.submitted_s)


class ChunkTimes:
    """When the chunks of one prompt that is computed here were ready, for its trace.

    A prompt may have very many chunks, so beyond a fixed number neighbours are joined.
    """

    def __init__(self) -> None:
        self._chunks: list[pb.ComputedChunk] = []

    def add(self, token_start: int, token_stop: int, ended_s: float) -> None:
        """Adds a chunk that was ready at `ended_s`, in seconds since the request arrived."""
        if len(self._chunks) >= _CHUNKS_MAX:
            pairs = zip(self._chunks[::2], self._chunks[1::2], strict=True)
            self._chunks = [_joined(first, second) for first, second in pairs]
        chunk = pb.ComputedChunk(ended_s=ended_s, token_start=token_start, token_stop=token_stop, steps=1)
        self._chunks.append(chunk)

    def take(self) -> list[pb.ComputedChunk]:
        """Removes all chunks and returns them in order."""
        taken, self._chunks = self._chunks, []
        return taken


def _joined(first: pb.ComputedChunk, second: pb.ComputedChunk) -> pb.ComputedChunk:
    """Joins two neighbours. The second begins before the first if the request had to be computed again."""
    return pb.ComputedChunk(
        ended_s=second.ended_s,
        token_start=min(first.token_start, second.token_start),
        token_stop=max(first.token_stop, second.token_stop),
        steps=first.steps + second.steps,
    )


# Below this size, rebuilding the heap to drop outdated entries is not worth its cost.
_HEAP_MIN = 64


class Deadlines:
    """At most one deadline for each engine id. Setting one costs O(log n), reading the first one nothing."""

    def __init__(self) -> None:
        self._by_id: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []  # entries that differ from `_by_id` are outdated

    def set(self, engine_id: str, deadline_s: float | None) -> None:
        """Replaces the deadline of one request; None removes it."""
        if self._by_id.get(engine_id) == deadline_s:
            return
        if deadline_s is None:
            del self._by_id[engine_id]
        else:
            self._by_id[engine_id] = deadline_s
            heapq.heappush(self._heap, (deadline_s, engine_id))
        if len(self._heap) > max(_HEAP_MIN, 2 * len(self._by_id)):
            self._heap = [(deadline_s, engine_id) for engine_id, deadline_s in self._by_id.items()]
            heapq.heapify(self._heap)
        while self._heap and self._by_id.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)

    @property
    def first_s(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def due(self, now_s: float) -> list[str]:
        """The requests whose deadline has come, earliest first. Their deadlines stay until they are set anew."""
        if self.first_s is None or self.first_s > now_s:
            return []
        return sorted((name for name, at_s in self._by_id.items() if at_s <= now_s), key=self._by_id.__getitem__)
