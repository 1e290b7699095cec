"""When the chunks of a prompt that is computed here were ready, for its trace. Pure.

A prompt may have very many chunks, so that neighbours are joined beyond a fixed number.
"""

from baton.protos.internal.v1 import decode_pb2 as pb

_CHUNKS_MAX = 64


class ChunkTimes:
    """Of one prompt."""

    def __init__(self) -> None:
        self._chunks: list[pb.ComputedChunk] = []

    def add(self, token_start: int, token_stop: int, ended_s: float) -> None:
        """`ended_s`: seconds since the request arrived."""
        if len(self._chunks) >= _CHUNKS_MAX:
            pairs = zip(self._chunks[::2], self._chunks[1::2], strict=True)
            self._chunks = [_joined(first, second) for first, second in pairs]
        chunk = pb.ComputedChunk(ended_s=ended_s, token_start=token_start, token_stop=token_stop, steps=1)
        self._chunks.append(chunk)

    def take(self) -> list[pb.ComputedChunk]:
        """All of them, in their order; they are forgotten here."""
        taken, self._chunks = self._chunks, []
        return taken


def _joined(first: pb.ComputedChunk, second: pb.ComputedChunk) -> pb.ComputedChunk:
    """The second begins before the first where the request had to be computed again."""
    return pb.ComputedChunk(
        ended_s=second.ended_s,
        token_start=min(first.token_start, second.token_start),
        token_stop=max(first.token_stop, second.token_stop),
        steps=first.steps + second.steps,
    )
