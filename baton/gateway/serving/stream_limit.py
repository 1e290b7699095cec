"""How many streams run while a client with few requests is next to one with many. Pure.

All streams of a node take part in its steps, so those of a large client slow a small one's down. Their time per token
is measured, whatever it consists of, and compared with that of a stream that ran alone:

    bound = streams * _SLOWER * time per token alone / time per token now

Step costs do not say it: they leave out the prompts between, the host's work, and other processes of the machine.
"""

from dataclasses import dataclass

from baton.gateway.serving.node_capacity import Room

# Streams are at most so many times slower than one alone. A light client's wait for its first token comes on top.
_SLOWER = 2.0
_EVERY_S = 0.25
_LEAST_TOKENS = 8  # that are worth a measurement
_GROWTH, _CUT = 1.15, 0.6  # in one interval: what was started before still shows in the measurements
_GROWS, _REACHED = 1.05, 0.8  # the bound grows where streams are that much faster than wanted, and nearly reach it
_LEAST_SHARE = 1 / 8  # of the seats is always allowed
_FIRST_SHARE = 1 / 4  # and at most so much before anything is measured
_ALONE_WEIGHT = 0.2


@dataclass
class StreamProgress:
    """What streams have got since the last measurement.

    Args:
        seconds: of all streams together, without those in which a message waited for its client.
        tokens: of all of them.
    """

    seconds: float = 0.0
    tokens: int = 0


class StreamBound:
    """The bound for one gateway, which counts other gateways' streams too."""

    def __init__(self) -> None:
        self._bound: float | None = None  # None: not needed, or nothing is measured
        self._alone_s: float | None = None
        self._at_s = 0.0
        self._progress = StreamProgress()

    def ended_alone(self, token_s: float) -> None:
        """An output has ended that had the nodes for itself."""
        if self._alone_s is None:
            self._alone_s = token_s
        self._alone_s += _ALONE_WEIGHT * (token_s - self._alone_s)

    def most(self, room: Room) -> float:
        """Streams of clients with many requests start only while fewer than this number run."""
        most = self._most(room)
        if self._bound is not None:
            return min(most, self._bound)
        return min(most, max(self._least(room), min(room.spared, _FIRST_SHARE * room.seats)))

    def measured(self, progress: StreamProgress, room: Room, now_s: float, *, spares: bool) -> None:
        """Streams have got so many tokens since the last call.

        Args:
            spares: streams are to be kept fast now.
        """
        if not spares:
            self._bound, self._at_s, self._progress = None, now_s, StreamProgress()
            return
        self._progress.seconds += progress.seconds
        self._progress.tokens += progress.tokens
        alone_s = self._alone_s if self._alone_s is not None else room.alone_s
        if now_s < self._at_s + _EVERY_S or self._progress.tokens < _LEAST_TOKENS or not alone_s:
            return
        wanted = _SLOWER * alone_s * self._progress.tokens / max(1e-9, self._progress.seconds)
        self._at_s, self._progress = now_s, StreamProgress()
        bound = self.most(room)
        if wanted < 1:
            bound = min(bound, room.load) * max(_CUT, wanted)
        elif wanted > _GROWS and room.load >= _REACHED * bound:
            bound = max(bound + 1, bound * min(_GROWTH, wanted))
        self._bound = min(self._most(room), max(self._least(room), bound))

    def _most(self, room: Room) -> float:
        return float(sum(node.most_shared for node in room.decodes))

    def _least(self, room: Room) -> float:
        return max(len(room.decodes), _LEAST_SHARE * room.seats)
