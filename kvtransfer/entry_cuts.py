"""Cuts an entry into the pieces that ranks of another node keep, and joins such pieces. Knows no transport and no
store.

Ranks of nodes with different tensor parallelism keep different heads, or layers, of the same entry. A piece is sent
like an entry's message, with a trailer that names it and has its digest. It is cut only from a message that has been
checked, so damage at the owner never becomes part of a piece.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.core.kv_entries import ENTRY_TOKENS, EntryKey
from baton.kvcache.spec import KVKind
from baton.kvcache.wire.digest import digest
from kvtransfer.flows import Flow, common
from kvtransfer.offload_jobs import Piece
from kvtransfer.records import EntryLink
from kvtransfer.segments import TRAILER_BYTES, Segment, payload_bytes
from kvtransfer.stores.entry import EntryLayout, EntryMessage

# Pieces begin at multiples of this in a message, because digests read words.
_ALIGN_BYTES = 64

# Called repeatedly during long operations, so that messages advance meanwhile.
Between = Callable[[], object]


class EntryCut:
    """The part of each entry, or of one piece of a state, that one link carries.

    Args:
        layout: of this rank's entries.
        pieces: each lies in one message.

    Attributes:
        message_bytes: size of the link's message about an entry: its pieces, one after the other.
        cells: number of (layer, head) cells of the pieces.
    """

    def __init__(self, layout: EntryLayout, pieces: Sequence[tuple[EntryMessage, Flow]]) -> None:
        self._layout = layout
        self._pieces: list[MessagePiece] = []
        self.message_bytes, self.cells = 0, 0
        for form, flow in pieces:
            piece = MessagePiece(layout, form, flow, self.message_bytes)
            self._pieces.append(piece)
            self.message_bytes = -(-piece.stop // _ALIGN_BYTES) * _ALIGN_BYTES
            self.cells += len(flow.layers) * len(flow.heads)

    def cut(self, key: EntryKey, entry: Tensor, message: Tensor, *, named: EntryKey, between: Between) -> bool:
        """Writes the pieces of an entry to a message. Returns False if the entry is damaged.

        Args:
            named: the entry that the pieces' trailers name: itself, or the one before a state.
        """
        for piece in self._pieces:
            if not is_whole(self._layout.segment(key, piece.form), piece.held(entry), between):
                return False
            piece.in_message(message)[:] = piece.in_entry(entry)
            _seal(piece.segment(named), piece.sent(message), between)
        return True

    def join(self, named: EntryKey, message: Tensor, entry: Tensor, *, between: Between) -> bool:
        """Copies a message's pieces to their places in an entry. Returns False if the message is damaged."""
        for piece in self._pieces:
            if not is_whole(piece.segment(named), piece.sent(message), between):
                return False
            piece.in_entry(entry)[:] = piece.in_message(message)
        return True


@dataclass(frozen=True)
class LinkCuts:
    """The parts of this rank's entries and states that one link carries.

    Attributes:
        entry: of each entry; None: nothing.
        state: of a state, each in a message of its own, with the number of its piece here.
    """

    entry: EntryCut | None
    state: tuple[tuple[int, EntryCut], ...]

    @property
    def message_bytes(self) -> int:
        """Size of the largest message."""
        cuts = [cut for _, cut in self.state] + ([] if self.entry is None else [self.entry])
        return max(cut.message_bytes for cut in cuts)


def cuts_of(layout: EntryLayout, link: EntryLink) -> LinkCuts | None:
    """The parts that a link carries. Returns None if it carries whole entries and states."""
    if not link.flows:
        return None
    in_entry: list[tuple[EntryMessage, Flow]] = []
    in_state: list[tuple[int, EntryCut]] = []
    for flow in link.flows:
        form = next((form for form in layout.messages if common(form.layers, flow.layers)), None)
        if form is not None:
            in_entry.append((form, flow))
            continue
        number, piece = next(
            (number, piece)
            for number, piece in enumerate(layout.pieces)
            if common(piece.layers, flow.layers) and common(piece.heads, flow.heads)
        )
        in_state.append((number, EntryCut(layout, [(piece, flow)])))
    return LinkCuts(EntryCut(layout, in_entry) if in_entry else None, tuple(in_state))


def cells_of(forms: Iterable[EntryMessage]) -> int:
    """Number of (layer, head) cells of messages."""
    return sum(len(form.layers) * len(form.heads) for form in forms)


def complete(layout: EntryLayout, piece: Piece, entry: Tensor, *, between: Between) -> None:
    """Writes the trailers of an entry, or of a piece of a state, whose parts have all been joined."""
    key, forms = piece
    for form in forms:
        _seal(layout.segment(key, form), entry[form.start : form.start + form.size], between)


class MessagePiece:
    """The piece of one message of an entry.

    Args:
        start: of the piece in the link's message, if it travels.
    """

    def __init__(self, layout: EntryLayout, form: EntryMessage, flow: Flow, start: int = 0) -> None:
        self.form = form
        self._layout = layout
        self._flow = flow
        spec = form.part.spec
        tokens = 1 if spec.kind is KVKind.STATE else ENTRY_TOKENS
        self._bytes = payload_bytes(spec, layers=len(flow.layers), tokens=tokens, heads=len(flow.heads))
        self._start = start
        self.stop = start + self._bytes + TRAILER_BYTES
        # Wire order is [layer, k/v, token, head, channel].
        self._shape = spec.kv_factor * tokens, -1, spec.head_dim * spec.itemsize
        self._layers = slice(flow.layers.start - form.layers.start, flow.layers.stop - form.layers.start)
        self._heads = slice(flow.heads.start - form.heads.start, flow.heads.stop - form.heads.start)

    def segment(self, key: EntryKey) -> Segment:
        """The segment that the piece of this entry must hold, without its digest."""
        return replace(
            self._layout.segment(key, self.form),
            number=self.form.part.number,  # pieces of states have other numbers at each end
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


def is_whole(segment: Segment, sealed: Tensor, between: Between) -> bool:
    """Whether a payload and its trailer are those of a segment."""
    payload, trailer = sealed[:-TRAILER_BYTES], bytes(sealed[-TRAILER_BYTES:].numpy())
    return trailer == segment.encode(segment.digest_over(digest(payload, between=between)))


def _seal(segment: Segment, sealed: Tensor, between: Between) -> None:
    """Writes the trailer of a payload."""
    trailer = segment.encode(segment.digest_over(digest(sealed[:-TRAILER_BYTES], between=between)))
    sealed[-TRAILER_BYTES:] = torch.frombuffer(bytearray(trailer), dtype=torch.uint8)
