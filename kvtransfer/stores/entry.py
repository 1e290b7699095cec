"""The form of an entry: the KV of some tokens of a sequence, from one rank's cache, in wire order. Pure; no torch.

An entry has one message for each part of the cache: a payload and its trailer, as a message between two nodes has. The
trailer names the entry by the first bits of its digest, and covers payload and names with a digest of its own. So a
reader can check that an entry is whole, and that it is the one that was wanted.

A recurrent state has no tokens of its own, and is much larger than the KV of some tokens. It is kept in pieces of an
entry's size, each with a key of its own, and is of use where all of them are there.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from baton.core.block_keys import DIGEST_BYTES, BlockKey
from baton.core.kv_entries import ENTRY_TOKENS, EntryKey
from baton.kvcache.spec import KVKind
from kvtransfer.parts import Part, PartPlace
from kvtransfer.segments import LEASE_NUMBER_BITS, TRAILER_BYTES, Segment, payload_bytes, trailer_over

# Messages begin at multiples of this, so that files can be read without the page cache.
MESSAGE_ALIGN_BYTES = 4096
# At about this position attention costs as much as the rest of a model: Llama-8B's does at 30k tokens.
_ATTENTION_EVEN_AT = 32768
_TOKEN_BYTES = 4
# The number of this form of entries. It changes when an entry's bytes get another meaning.
_FORM = 1


class StateKey(EntryKey):
    """Names a piece of a state, and is equal to an `EntryKey` with the same fields.

    Attributes:
        after: the last entry that the state includes.
        piece: counts the pieces of the state.
    """

    after: EntryKey
    piece: int


@dataclass(frozen=True)
class EntryMessage:
    """A message of an entry or of a state's piece.

    Attributes:
        number: in its trailer.
        layers, heads: in the numbers of segments.
        start, size: first byte in the entry, and number of bytes.
        payload_bytes: without the trailer.
    """

    part: Part
    number: int
    layers: range
    heads: range
    start: int
    size: int
    payload_bytes: int = field(init=False, repr=False)
    _cells: tuple[range, range] = field(init=False, repr=False)
    _is_state: bool = field(init=False, repr=False)

    def place(self, key: EntryKey) -> PartPlace:
        """Where this entry's payload lies in its part's cache."""
        layers, heads = self._cells
        if self._is_state:
            return PartPlace(self.part.number, layers, 0, 1, heads)
        start = key.number * ENTRY_TOKENS
        return PartPlace(self.part.number, layers, start, start + ENTRY_TOKENS, heads)

    def token_start(self, key: EntryKey) -> int:
        """The first token of this entry's segment."""
        return key.token_stop - 1 if self._is_state else key.number * ENTRY_TOKENS

    def __post_init__(self) -> None:
        # NOTE: not as cached properties, which take a lock each time: they cost more than all else that an entry needs
        # of its message.
        object.__setattr__(self, "_cells", self.part.cells(self.layers, self.heads))
        object.__setattr__(self, "_is_state", self.part.spec.kind is KVKind.STATE)
        object.__setattr__(self, "payload_bytes", self.size - TRAILER_BYTES)


class EntryLayout:
    """Where the messages of an entry lie, one for each part of a rank's cache, and the pieces of a state.

    Args:
        parts: of the rank's cache.

    Attributes:
        parts: of the rank's cache.
        messages: of an entry.
        pieces: the message of each piece of a state; empty: the model has none.
        entry_bytes: size of an entry, a multiple of MESSAGE_ALIGN_BYTES.
        message_bytes: size of the largest message.
        namespace: a digest of all that decides what the bytes of an entry mean, apart from its key. Entries of another
            namespace cannot be read.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        paged = [part for part in parts if part.spec.kind is not KVKind.STATE]
        states = [part for part in parts if part.spec.kind is KVKind.STATE]
        sizes = [_payload_bytes(part, part.layers, part.heads) + TRAILER_BYTES for part in paged]
        aligned = [_aligned(size) for size in sizes]
        self.messages = tuple(
            EntryMessage(part, part.number, part.layers, part.heads, start, size)
            for part, start, size in zip(paged, [0, *accumulate(aligned)], sizes, strict=False)
        )
        # A head of a state is not cut.
        heads = [_aligned(_payload_bytes(part, part.layers[:1], part.heads[:1]) + TRAILER_BYTES) for part in states]
        self.entry_bytes = max(sum(aligned), *heads, 0)
        self.pieces = tuple(piece for part in states for piece in _pieces(part, self.entry_bytes))
        self.message_bytes = max(message.size for message in (*self.messages, *self.pieces))
        self.namespace = _namespace(parts)

    def state_keys(self, after: EntryKey) -> tuple[StateKey, ...]:
        """Keys of the pieces of the state after an entry.

        They are a sequence of their own: an entry that comes before a state may leave a store before it, and a session
        that ends need not know the states of its earlier turns.
        """
        return tuple(state_key(after, number) for number in range(len(self.pieces)))

    def last_state_key(self, after: EntryKey) -> StateKey:
        """The last one of `state_keys`. Stores evict it before the others."""
        return state_key(after, len(self.pieces) - 1)

    def cost(self, key: EntryKey) -> float:
        """The cost to compute an entry again, relative to one at the start of a prompt.

        A state is of use with the entries before it only. So its pieces cost as much less as they are many: those of a
        short prompt leave first.
        """
        cost = 1 + key.token_start / _ATTENTION_EVEN_AT
        if len(key.block.tokens) == ENTRY_TOKENS * _TOKEN_BYTES:
            return cost
        entries = key.number + 1
        return cost * entries / (entries + len(self.pieces))

    def segment(self, key: EntryKey, message: EntryMessage) -> Segment:
        """The segment that a message of this entry must hold, without its digest."""
        return Segment(
            incarnation=0,
            lease=_lease_of(key),
            number=message.number,
            layer_start=message.layers.start,
            layer_stop=message.layers.stop,
            token_start=message.token_start(key),
            token_stop=key.token_stop,
            head_start=message.heads.start,
            head_stop=message.heads.stop,
            payload_bytes=message.payload_bytes,
        )

    def seal(self, memory: memoryview, key: EntryKey, message: EntryMessage, payload_digest: int) -> None:
        """Writes the trailer of a message of this entry behind its payload, which has that digest."""
        stop = message.start + message.size
        memory[stop - TRAILER_BYTES : stop] = trailer_over(
            payload_digest,
            lease=_lease_of(key),
            number=message.number,
            layers=message.layers,
            token_start=message.token_start(key),
            token_stop=key.token_stop,
            heads=message.heads,
            payload_bytes=message.payload_bytes,
        )


def state_key(after: EntryKey, piece: int) -> StateKey:
    """The key of a piece of the state after an entry."""
    before = _piece_digest(after, piece - 1) if piece else after.root
    tokens = after.block.tokens + _named(piece)
    key = StateKey(BlockKey(_piece_digest(after, piece), tokens, before), after.root, after.number)
    key.after, key.piece = after, piece
    return key


def _lease_of(key: EntryKey) -> int:
    return int.from_bytes(key.block.digest[:8], "little") % (1 << LEASE_NUMBER_BITS)


def _piece_digest(after: EntryKey, number: int) -> bytes:
    return hashlib.blake2b(after.block.digest + b"state" + _named(number), digest_size=DIGEST_BYTES).digest()


def _named(number: int) -> bytes:
    return number.to_bytes(4, "little")


def _pieces(part: Part, entry_bytes: int) -> Iterator[EntryMessage]:
    """Cuts a state: as many layers together as fit, or some heads of one layer where a layer is too large."""
    room = entry_bytes - TRAILER_BYTES
    layers_each = max(1, room // _payload_bytes(part, part.layers[:1], part.heads))
    heads_each = min(len(part.heads), room // _payload_bytes(part, part.layers[:1], part.heads[:1]))
    number = part.number
    for layer in range(0, len(part.layers), layers_each):
        for head in range(0, len(part.heads), heads_each):
            layers, heads = part.layers[layer : layer + layers_each], part.heads[head : head + heads_each]
            size = _payload_bytes(part, layers, heads) + TRAILER_BYTES
            yield EntryMessage(part, number, layers, heads, 0, size)
            number += 1


def _payload_bytes(part: Part, layers: range, heads: range) -> int:
    tokens = 1 if part.spec.kind is KVKind.STATE else ENTRY_TOKENS
    return payload_bytes(part.spec, layers=len(layers), tokens=tokens, heads=len(heads))


def _aligned(size: int) -> int:
    return -(-size // MESSAGE_ALIGN_BYTES) * MESSAGE_ALIGN_BYTES


def _namespace(parts: Sequence[Part]) -> bytes:
    # NOTE: of these fields alone, so that a field that is added to a spec does not make old files useless.
    described = [
        (
            part.spec.kind.value,
            part.spec.head_dim,
            part.spec.dtype,
            tuple(part.layers),
            (part.heads.start, part.heads.stop),
        )
        for part in parts
    ]
    return hashlib.blake2b(repr((_FORM, ENTRY_TOKENS, described)).encode(), digest_size=16).digest()
