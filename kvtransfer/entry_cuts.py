"""Cuts from an entry what a rank of another node keeps of it, and joins such pieces. Knows no transport and no store.

Ranks of two nodes of unlike tensor parallelism keep other heads, or other layers, of the same entry. A piece travels as
an entry's message does, with a trailer that names it and has its digest. It is cut only from a message that has been
checked, so damage at the owner never becomes part of a piece.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from baton.core.kv_entries import ENTRY_TOKENS, EntryKey
from baton.kvcache.wire.digest import digest
from kvtransfer.flows import Flow, common
from kvtransfer.records import EntryLink
from kvtransfer.segments import TRAILER_BYTES, Segment, payload_bytes
from kvtransfer.stores.entry import EntryLayout, EntryMessage

# Pieces begin at multiples of this in a message, because digests read words.
_ALIGN_BYTES = 64

# Called repeatedly during long operations, so that messages advance meanwhile.
Between = Callable[[], object]


class EntryCut:
    """What one link carries of each entry that this rank keeps, or is to keep.

    Args:
        layout: of this rank's entries.
        flows: of the link; each lies in one part.

    Attributes:
        message_bytes: size of the link's message about an entry: its pieces, one after the other.
        cells: how many (layer, head) cells the pieces have.
    """

    def __init__(self, layout: EntryLayout, flows: Sequence[Flow]) -> None:
        self._layout = layout
        self._pieces: list[_Piece] = []
        self.message_bytes = self.cells = 0
        for flow in flows:
            form = next(form for form in layout.messages if common(form.layers, flow.layers))
            piece = _Piece(layout, form, flow, self.message_bytes)
            self._pieces.append(piece)
            self.message_bytes = -(-piece.stop // _ALIGN_BYTES) * _ALIGN_BYTES
            self.cells += len(flow.layers) * len(flow.heads)

    def cut(self, key: EntryKey, entry: Tensor, message: Tensor, *, between: Between) -> bool:
        """Writes the pieces of an entry to a message. Returns False if the entry is damaged."""
        for piece in self._pieces:
            if not _is_whole(self._layout.segment(key, piece.form), piece.held(entry), between):
                return False
            piece.in_message(message)[:] = piece.in_entry(entry)
            _seal(piece.segment(key), piece.sent(message), between)
        return True

    def join(self, key: EntryKey, message: Tensor, entry: Tensor, *, between: Between) -> bool:
        """Copies a message's pieces to their places in an entry. Returns False if the message is damaged."""
        for piece in self._pieces:
            if not _is_whole(piece.segment(key), piece.sent(message), between):
                return False
            piece.in_entry(entry)[:] = piece.in_message(message)
        return True


def cut_of(layout: EntryLayout, link: EntryLink) -> EntryCut | None:
    """What a link carries of each entry. Returns None if it carries whole entries."""
    return EntryCut(layout, link.flows) if link.flows else None


def cells_of(layout: EntryLayout) -> int:
    """How many (layer, head) cells an entry has."""
    return sum(len(form.layers) * len(form.heads) for form in layout.messages)


def complete(layout: EntryLayout, key: EntryKey, entry: Tensor, *, between: Between) -> None:
    """Writes the trailers of an entry whose pieces have all been joined."""
    for form in layout.messages:
        _seal(layout.segment(key, form), entry[form.start : form.start + form.size], between)


class _Piece:
    """The piece of one message of an entry.

    Args:
        start: of the piece in the link's message.
    """

    def __init__(self, layout: EntryLayout, form: EntryMessage, flow: Flow, start: int) -> None:
        self.form = form
        self._layout = layout
        self._flow = flow
        spec = form.part.spec
        self._bytes = payload_bytes(spec, layers=len(flow.layers), tokens=ENTRY_TOKENS, heads=len(flow.heads))
        self._start = start
        self.stop = start + self._bytes + TRAILER_BYTES
        # Wire order is [layer, k/v, token, head, channel].
        self._shape = spec.kv_factor * ENTRY_TOKENS, -1, spec.head_dim * spec.itemsize
        self._layers = slice(flow.layers.start - form.layers.start, flow.layers.stop - form.layers.start)
        self._heads = slice(flow.heads.start - form.heads.start, flow.heads.stop - form.heads.start)

    def segment(self, key: EntryKey) -> Segment:
        """The segment that the piece of this entry must hold, without its digest."""
        return replace(
            self._layout.segment(key, self.form),
            layer_start=self._flow.layers.start,
            layer_stop=self._flow.layers.stop,
            head_start=self._flow.heads.start,
            head_stop=self._flow.heads.stop,
            payload_bytes=self._bytes,
        )

    def sent(self, message: Tensor) -> Tensor:
        """The piece with its trailer."""
        return message[self._start : self.stop]

    def held(self, entry: Tensor) -> Tensor:
        """The message in the entry."""
        return entry[self.form.start : self.form.start + self.form.size]

    def in_message(self, message: Tensor) -> Tensor:
        """The piece's cells in the link's message."""
        return self._cells(self.sent(message), len(self._flow.layers))

    def in_entry(self, entry: Tensor) -> Tensor:
        """The same cells in the entry."""
        return self._cells(self.held(entry), len(self.form.layers))[self._layers, :, self._heads]

    def _cells(self, sealed: Tensor, layers: int) -> Tensor:
        return sealed[:-TRAILER_BYTES].view(layers, *self._shape)


def _is_whole(segment: Segment, sealed: Tensor, between: Between) -> bool:
    """Whether a payload and its trailer are those of a segment."""
    payload, trailer = sealed[:-TRAILER_BYTES], bytes(sealed[-TRAILER_BYTES:].numpy())
    return trailer == segment.encode(segment.digest_over(digest(payload, between=between)))


def _seal(segment: Segment, sealed: Tensor, between: Between) -> None:
    """Writes the trailer of a payload."""
    trailer = segment.encode(segment.digest_over(digest(sealed[:-TRAILER_BYTES], between=between)))
    sealed[-TRAILER_BYTES:] = torch.frombuffer(bytearray(trailer), dtype=torch.uint8)
