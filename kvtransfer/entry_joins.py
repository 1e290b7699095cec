"""Joins a rank's entry from the entries of a node with a different number of ranks. Knows no store.

As with pieces that are sent (`entry_cuts`), each message is checked before anything is copied from it, and the joined
entry has its own trailers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from baton.core.kv_entries import EntryKey
from baton.kvcache.spec import KVCacheSpec
from kvtransfer.entry_cuts import MessagePiece, complete, is_whole
from kvtransfer.flows import Flow, common, heads_of
from kvtransfer.parts import parts_of
from kvtransfer.stores.entry import EntryLayout, EntryMessage, StateKey, state_key


@dataclass(frozen=True)
class JoinPart:
    """The part that is copied from one entry of another rank, or from one piece of its state.

    Attributes:
        layout: of the other rank's entries.
        state_piece: the number of the piece there; -1: it is an entry.
        cells: places in the other rank's messages, and in ours.
    """

    layout: EntryLayout
    state_piece: int
    cells: tuple[tuple[MessagePiece, MessagePiece], ...]

    def key(self, wanted: EntryKey) -> EntryKey:
        """The other rank's key of what this is taken from."""
        return state_key(wanted.after, self.state_piece) if isinstance(wanted, StateKey) else wanted

    def copy(self, wanted: EntryKey, theirs: Tensor, ours: Tensor) -> bool:
        """Copies what is taken. Returns False if the other rank's entry is damaged."""
        key = self.key(wanted)
        for there, here in self.cells:
            if not is_whole(self.layout.segment(key, there.form), there.held(theirs), _nothing):
                return False
            here.in_entry(ours)[:] = there.in_entry(theirs)
        return True


class EntryJoin:
    """The way in which a rank's entries are joined.

    Args:
        ours: layout of this rank's entries.
        spec: of the whole model.
        ranks: of the other node.

    Attributes:
        layouts: of the entries of those ranks that have something to take; ranks that keep the same count as one.

    Raises:
        ConfigError: that many ranks cannot split the kv heads, see `heads_of`.
    """

    def __init__(self, ours: EntryLayout, spec: KVCacheSpec, ranks: int) -> None:
        held = dict.fromkeys(
            tuple(heads_of(rank, ranks=ranks, num_kv_heads=part.num_kv_heads) for part in spec.parts)
            for rank in range(ranks)
        )
        self._ours = ours
        shares = {heads: share for heads, share in zip(held, _shares(ours, list(held)), strict=True) if share}
        theirs = {EntryLayout(parts_of(spec, heads)): share for heads, share in shares.items()}
        self.layouts = tuple(theirs)
        self._entry = tuple(_of_entry(ours, layout, share) for layout, share in theirs.items())
        self._state = tuple(
            tuple(part for layout, share in theirs.items() for part in _of_state(ours, piece, layout, share))
            for piece in ours.pieces
        )

    def parts(self, wanted: EntryKey) -> Sequence[JoinPart]:
        """The parts from which an entry, or a piece of a state, is joined."""
        if isinstance(wanted, StateKey):
            return self._state[wanted.piece]
        return [part for part in self._entry if part.cells]

    def needed(self, wanted: EntryKey) -> Sequence[JoinPart]:
        """The same, but for a piece of a state what all its pieces are joined from: it is of use with them only."""
        if isinstance(wanted, StateKey):
            return [part for parts in self._state for part in parts]
        return self.parts(wanted)

    def complete(self, wanted: EntryKey, entry: Tensor) -> None:
        """Writes the trailers of an entry whose parts have all been copied."""
        messages = self._ours.messages
        if isinstance(wanted, StateKey):
            messages = (self._ours.pieces[wanted.piece],)
        complete(self._ours, (wanted, messages), entry, between=_nothing)


def _shares(ours: EntryLayout, held: Sequence[Sequence[range]]) -> Iterator[tuple[Flow, ...]]:
    """What is taken from each rank: the heads that we keep too, if no rank before it has them."""
    taken: set[tuple[int, int]] = set()
    for heads_of_parts in held:
        share = []
        for part, theirs in zip(ours.parts, heads_of_parts, strict=True):
            heads = common(part.heads, theirs)
            if heads and (part.number, heads.start) not in taken:
                taken.add((part.number, heads.start))
                share.append(Flow(part.layers, heads))
        yield tuple(share)


def _of_entry(ours: EntryLayout, theirs: EntryLayout, share: Sequence[Flow]) -> JoinPart:
    cells = (
        (MessagePiece(theirs, there, flow), MessagePiece(ours, here, flow))
        for here, there in zip(ours.messages, theirs.messages, strict=True)
        for flow in share
        if flow.layers == here.layers
    )
    return JoinPart(theirs, -1, tuple(cells))


def _of_state(ours: EntryLayout, piece: EntryMessage, theirs: EntryLayout, share: Sequence[Flow]) -> Iterator[JoinPart]:
    for number, other in enumerate(theirs.pieces):
        for flow in share:
            layers = common(flow.layers, common(piece.layers, other.layers))
            heads = common(flow.heads, common(piece.heads, other.heads))
            if layers and heads:
                taken = Flow(layers, heads)
                yield JoinPart(
                    theirs, number, ((MessagePiece(theirs, other, taken), MessagePiece(ours, piece, taken)),)
                )


def _nothing() -> None: ...
