"""Tracks the KV that one Prefill call sends: computed but unsent, in flight, and sent. Pure.

It does not know why the call computes or ends.
"""

from collections import deque
from collections.abc import Sequence
from itertools import chain, groupby

from baton.engine.events import ChunkComputed, LayersComputed
from baton.kvcache.spec import KVCacheSpec
from baton.protos.internal.v1 import prefill_pb2 as pb
from kvtransfer.records import SendJob
from kvtransfer.segments import Segment, SegmentPiece
from prefill_node.commands import SendKV
from prefill_node.events import Called


class CallSends:
    """The sends of one call, one job at a time. KV that is computed while a job is under way is sent together.

    Attributes:
        under_way: whether the transport has a job that it has not completed.
    """

    def __init__(self, called: Called, *, spec: KVCacheSpec, now_s: float) -> None:
        request = called.request
        self.under_way = False
        self._call = called.call
        self._peer = called.peer
        self._ticket = request.ticket
        self._layer_groups = -(-spec.num_layers // called.layers_per_group)
        self._called_s = self._started_s = now_s
        self._parts: list[pb.SentPart] | None = [] if request.traceparent else None  # not reported yet
        self._block_ids: tuple[int, ...] = ()
        self._owner: int | None = None
        self._state_slot = -1  # of the state after the ticket's last token, once it is computed
        sent = spec if called.peer.has_draft else spec.without_draft
        self._unsent = Unsent(sent, token_start=self._ticket.token_start, token_stop=self._ticket.token_stop)
        self._pieces: deque[SegmentPiece] = deque()  # taken from `_unsent`, and sent one after the other
        self._sending: SegmentPiece | None = None  # the last one that was given to the transport
        self._segments: list[Segment] = []

    def computed(self, event: LayersComputed | ChunkComputed, now_s: float) -> list[SendKV]:
        """Records the KV that the cache now holds. Returns the next job, as `next` does."""
        self._owner, self._block_ids = event.owner, event.block_ids
        if isinstance(event, LayersComputed):
            self._unsent.computed(event.token_stop, layer_stop=event.layer_stop, index_stop=event.index_stop)
        else:
            if event.token_stop == self._ticket.token_stop:
                self._state_slot = event.state_slot
            self._unsent.computed(event.token_stop)
        return self.next(now_s)

    def next(self, now_s: float) -> list[SendKV]:
        """The next job, unless one is under way or nothing is left to send."""
        if self.under_way:
            return []
        if not self._pieces:
            self._pieces.extend(self._unsent.take())
        if not self._pieces:
            return []
        self.under_way, self._started_s = True, now_s
        self._sending = self._pieces.popleft()
        return [SendKV(self._call, self._job(self._sending))]

    def sent(self, segments: Sequence[Segment], now_s: float) -> None:
        """Records that the job under way is complete at the transport."""
        self.under_way = False
        self._segments += segments
        if self._parts is not None and self._sending is not None:
            self._parts.append(self._part(self._sending, segments, now_s))

    def take_parts(self) -> list[pb.SentPart]:
        """The times of the sends that ended since the last call; none unless the request is traced."""
        taken, self._parts = self._parts or [], None if self._parts is None else []
        return taken

    def summary(self, prefill_s: float | None) -> pb.PrefillSent:
        """The summary for the gateway, once all KV is sent."""
        return pb.PrefillSent(
            tokens_sent=self._ticket.token_stop - self._ticket.token_start,
            bytes_sent=sum(segment.payload_bytes for segment in self._segments),
            segments=len(self._segments),
            transport=self._peer.transport,
            segment_bytes=max((segment.payload_bytes for segment in self._segments), default=0),
            kv_converted=self._peer.kv_converted,
            layer_groups=self._layer_groups,
            prefill_s=prefill_s,
        )

    def _job(self, piece: SegmentPiece) -> SendJob:
        ticket = self._ticket
        return SendJob(
            peer=self._peer.number,
            sender_number=self._peer.sender_number,
            lease=ticket.lease.number,
            incarnation=ticket.lease.incarnation,
            # Every link of a peer counts its own segments, from a number that no link has used for this lease.
            first_segment=max((segment.number + 1 for segment in self._segments), default=0),
            token_start=piece.token_start,
            token_stop=piece.token_stop,
            resume_at=ticket.resume_at,
            block_ids=self._block_ids,
            layers=piece.layers,
            key=ticket.lease.key,
            state_slot=self._state_slot,
            owner=self._owner,
            owner_there=ticket.owner_rank if ticket.HasField("owner_rank") else None,
        )

    def _part(self, piece: SegmentPiece, segments: Sequence[Segment], now_s: float) -> pb.SentPart:
        return pb.SentPart(
            started_s=self._started_s - self._called_s,
            ended_s=now_s - self._called_s,
            token_start=piece.token_start,
            token_stop=piece.token_stop,
            segments=len(segments),
            bytes=sum(segment.payload_bytes for segment in segments),
        )


class Unsent:
    """Tracks which KV of the tokens [token_start, token_stop) is computed and not sent yet, by layer.

    Of a state only the cell after the last token counts.

    Args:
        spec: numbers the layers of all parts in one sequence.
    """

    def __init__(self, spec: KVCacheSpec, *, token_start: int, token_stop: int) -> None:
        self._token_stop = token_stop
        self._index_start = spec.num_layers
        self._taken = [part.first_kept(token_start, token_stop) for part in spec.parts for _ in range(part.num_layers)]
        self._computed = self._taken[:]

    def computed(self, token_stop: int, *, layer_stop: int | None = None, index_stop: int = 0) -> None:
        """Records that the cache holds all tokens before `token_stop`, and the state after them.

        Computing a prompt again after a preemption takes nothing back.

        Args:
            layer_stop: only the layers before this one hold them; None: all layers of all parts do.
            index_stop: with `layer_stop`, the number of an index's layers that also hold them.
        """
        token_stop = min(token_stop, self._token_stop)
        index = range(self._index_start, self._index_start + index_stop)
        for layer in range(len(self._computed)) if layer_stop is None else chain(range(layer_stop), index):
            self._computed[layer] = max(self._computed[layer], token_stop)

    def take(self) -> list[SegmentPiece]:
        """Takes all computed KV that was not taken before. Neighbouring layers with equal ranges share a piece."""
        ranges = list(zip(self._taken, self._computed, strict=True))
        self._taken = self._computed[:]
        alike = [(tokens, list(layers)) for tokens, layers in groupby(range(len(ranges)), key=ranges.__getitem__)]
        return [
            SegmentPiece(range(layers[0], layers[-1] + 1), *tokens) for tokens, layers in alike if tokens[0] < tokens[1]
        ]
