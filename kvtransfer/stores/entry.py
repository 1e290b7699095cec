"""The form of an entry: the KV of some tokens of a sequence, from one rank's cache, in wire order. Pure; no torch.

An entry has one message for each part of the cache: a payload and its trailer, as a message between two nodes has. The
trailer names the entry by the first bits of its digest, and covers payload and names with a digest of its own. So a
reader can check that an entry is whole, and that it is the one that was wanted.
"""

import hashlib
from collections.abc import Sequence
from itertools import accumulate

from baton.core.kv_entries import ENTRY_TOKENS, EntryKey
from baton.kvcache.spec import KVKind
from kvtransfer.parts import Part
from kvtransfer.segments import LEASE_NUMBER_BITS, TRAILER_BYTES, Segment, payload_bytes

# Messages begin at multiples of this, so that files can be read without the page cache.
MESSAGE_ALIGN_BYTES = 4096
# The number of this form of entries. It changes when an entry's bytes get another meaning.
_FORM = 1


class EntryLayout:
    """Where the messages of an entry lie, one for each part of a rank's cache.

    Args:
        parts: of the rank's cache; none of them is a state, which has no tokens.

    Attributes:
        entry_bytes: size of an entry, a multiple of MESSAGE_ALIGN_BYTES.
        message_bytes: size of the largest message.
        namespace: a digest of all that decides what the bytes of an entry mean, apart from its key. Entries of another
            namespace cannot be read.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        assert all(part.spec.kind is not KVKind.STATE for part in parts)
        self.parts = tuple(parts)
        sizes = [self._payload_bytes(part) + TRAILER_BYTES for part in parts]
        aligned = [-(-size // MESSAGE_ALIGN_BYTES) * MESSAGE_ALIGN_BYTES for size in sizes]
        self._places = tuple(zip([0, *accumulate(aligned)], sizes, strict=False))
        self.entry_bytes = sum(aligned)
        self.message_bytes = max(sizes)
        self.namespace = _namespace(self.parts)

    def place(self, part: Part) -> tuple[int, int]:
        """First byte and size of a part's message in the entry."""
        return self._places[part.number]

    def segment(self, key: EntryKey, part: Part) -> Segment:
        """The segment that a part's message of this entry must hold, without its digest."""
        return Segment(
            incarnation=0,
            lease=int.from_bytes(key.block.digest[:8], "little") % (1 << LEASE_NUMBER_BITS),
            number=part.number,
            layer_start=part.layers.start,
            layer_stop=part.layers.stop,
            token_start=key.token_start,
            token_stop=key.token_stop,
            head_start=part.heads.start,
            head_stop=part.heads.stop,
            payload_bytes=self._payload_bytes(part),
        )

    def _payload_bytes(self, part: Part) -> int:
        return payload_bytes(part.spec, layers=len(part.layers), tokens=ENTRY_TOKENS, heads=len(part.heads))


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
