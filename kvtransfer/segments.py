"""One message: its tag, its trailer, and how a token range is cut into messages. Pure; no torch.

A message is a payload in wire order, followed by a trailer, the serialized `baton.internal.v1.Segment`. Its digest is
the payload's digest plus a hash of all other fields, from which a kernel can start when it sums up the payload.

Since wire version 4 a lease has a key, which only the ticket carries. The trailer then has a seal in place of the
incarnation: a keyed hash of all fields but the digest. The other half of the same hash is the digest's summand.

Tag, from its highest bit: sender 12 bits | lease 36 bits | segment number 16 bits. A lease's number has 63 random bits:
the tag carries the lowest, the trailer all of them.
"""

import hashlib
import hmac
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Self

from baton.core.errors import ConfigError, InternalError
from baton.kvcache.spec import ALIGN_TOKENS, KVCacheSpec

SENDER_BITS = 12
LEASE_BITS = 36
# Bits of a lease's number: too many to guess one.
LEASE_NUMBER_BITS = 63
LEASE_KEY_BYTES = 32
NUMBER_BITS = 16
# This number marks warm-up messages; their lease field counts messages.
WARM_UP = (1 << NUMBER_BITS) - 1
# These mark the two directions of a round trip; their sender field is unused. Segments have lower numbers.
PING, PONG = WARM_UP - 1, WARM_UP - 2
SEGMENTS_MAX = PONG


@dataclass(frozen=True)
class Tag:
    """A message's sender, lease field and number: all that a receiver knows before it offers memory.

    Raises:
        InternalError: a part does not fit into its bits.
    """

    sender: int
    lease: int
    number: int

    def __post_init__(self) -> None:
        for name, bits in (("sender", SENDER_BITS), ("lease", LEASE_BITS), ("number", NUMBER_BITS)):
            value = getattr(self, name)
            if not 0 <= value < 1 << bits:
                raise InternalError(
                    f"a tag's {name} is {value}", field=name, value=value, allowed=(f"0 to {(1 << bits) - 1}",)
                )

    def pack(self) -> int:
        return (self.sender << LEASE_BITS | self.lease) << NUMBER_BITS | self.number

    @classmethod
    def of(cls, sender: int, segment: "Segment") -> Self:
        """The tag under which a sender sends a segment."""
        return cls(sender, lease_field(segment.lease), segment.number)

    @classmethod
    def unpack(cls, value: int) -> Self:
        """The tag that a 64-bit number encodes; every 64-bit number encodes one."""
        lease_and_number = value & ((1 << (LEASE_BITS + NUMBER_BITS)) - 1)
        return cls(
            value >> (LEASE_BITS + NUMBER_BITS),
            lease_and_number >> NUMBER_BITS,
            lease_and_number & ((1 << NUMBER_BITS) - 1),
        )


def lease_field(lease: int) -> int:
    """The lowest bits of a lease's number, which tags carry."""
    return lease & ((1 << LEASE_BITS) - 1)


@dataclass(frozen=True)
class Segment:
    """Some layers and heads of consecutive tokens of one request, in one part of its cache (`kvtransfer.parts`).

    A segment of a state has one token: the last that the state includes.

    Attributes:
        incarnation: of the node that granted the lease.
        digest: over the payload and all other fields; 0 when the sender has digests off.
        key: of the lease; empty: the segment has no seal, as before wire version 4 and in warm-ups.

    The fields are in the trailer's order.
    """

    incarnation: int
    lease: int
    number: int
    layer_start: int
    layer_stop: int
    token_start: int
    token_stop: int
    head_start: int
    head_stop: int
    payload_bytes: int
    digest: int = 0
    layer_step: int = 1
    key: bytes = field(default=b"", repr=False)

    @property
    def layers(self) -> range:
        return range(self.layer_start, self.layer_stop, self.layer_step)

    @property
    def heads(self) -> range:
        return range(self.head_start, self.head_stop)

    @property
    def cells(self) -> int:
        """Number of (layer, token, head) cells."""
        return len(self.layers) * (self.token_stop - self.token_start) * len(self.heads)

    @property
    def summand(self) -> int:
        """The number that is added to the payload's digest: a hash of all other fields, 64 bits."""
        return self._hashes[1]

    @property
    def seal(self) -> int:
        """The keyed hash of all fields but the digest, 64 bits. Only a holder of the key can compute it."""
        return self._hashes[0]

    def digest_over(self, payload_digest: int) -> int:
        """The segment's digest, from the payload's digest and all other fields."""
        return (payload_digest + self.summand) % (1 << 64)

    def encode(self, digest: int) -> bytes:
        """The trailer with this digest: always TRAILER_BYTES bytes, because every field is present and has a fixed
        size."""
        return self._pack(_SEAL_TAG, self.seal, digest) if self.key else self._pack(_TAGS[0], self.incarnation, digest)

    @cached_property
    def _hashes(self) -> tuple[int, int]:
        """Seal and summand. Without a key the seal is 0."""
        unsealed = self._pack(_TAGS[0], self.incarnation, 0)
        if not self.key:
            return 0, int.from_bytes(hashlib.blake2b(unsealed, digest_size=DIGEST_BYTES).digest(), "little")
        hashed = hashlib.blake2b(unsealed, digest_size=SEAL_BYTES + DIGEST_BYTES, key=self.key).digest()
        return int.from_bytes(hashed[:SEAL_BYTES], "little"), int.from_bytes(hashed[SEAL_BYTES:], "little")

    def _pack(self, first_tag: int, first: int, digest: int) -> bytes:
        layers = self.layer_start, self.layer_stop, self.layer_step
        tokens, heads = (self.token_start, self.token_stop), (self.head_start, self.head_stop)
        return _pack(first_tag, first, self.lease, self.number, layers, tokens, heads, self.payload_bytes, digest)


def trailer_over(
    payload_digest: int,
    *,
    lease: int,
    number: int,
    layers: range,
    token_start: int,
    token_stop: int,
    heads: range,
    payload_bytes: int,
) -> bytes:
    """The trailer of a segment without incarnation and key over a payload with that digest: what `Segment.encode` gives
    for its `digest_over`, without the objects between."""
    of_layers, of_heads = (layers.start, layers.stop, layers.step), (heads.start, heads.stop)
    unsealed = _pack(_TAGS[0], 0, lease, number, of_layers, (token_start, token_stop), of_heads, payload_bytes, 0)
    summand = int.from_bytes(hashlib.blake2b(unsealed, digest_size=DIGEST_BYTES).digest(), "little")
    digest = (payload_digest + summand) % (1 << 64)
    stop = DIGEST_OFFSET + DIGEST_BYTES
    return unsealed[:DIGEST_OFFSET] + digest.to_bytes(DIGEST_BYTES, "little") + unsealed[stop:]


def _pack(
    first_tag: int,
    first: int,
    lease: int,
    number: int,
    layers: tuple[int, int, int],
    tokens: tuple[int, int],
    heads: tuple[int, int],
    payload_bytes: int,
    digest: int,
) -> bytes:
    """A trailer. Layers are their start, stop and step, tokens and heads their start and stop."""
    # fmt: off
    return _TRAILER.pack(
        first_tag, first,
        0x11, lease,
        0x1D, number,
        0x25, layers[0],
        0x2D, layers[1],
        0x35, tokens[0],
        0x3D, tokens[1],
        0x45, heads[0],
        0x4D, heads[1],
        0x51, payload_bytes,
        0x59, digest,
        0x65, layers[2],
    )
    # fmt: on


# The serialized `baton.internal.v1.Segment`: its fields in order, each a tag byte and a fixed-size number. Packed by
# hand, because protobuf takes two to four times as long, warm and cold alike, and every segment needs it several times.
_TRAILER = struct.Struct("<BQBQBIBIBIBIBIBIBIBQBQBI")
_TAGS = (0x09, 0x11, 0x1D, 0x25, 0x2D, 0x35, 0x3D, 0x45, 0x4D, 0x51, 0x59, 0x65)
TRAILER_BYTES = _TRAILER.size
# Offset of the digest in a trailer.
DIGEST_OFFSET = struct.calcsize("<BQBQBIBIBIBIBIBIBIBQB")
DIGEST_BYTES = 8
SEAL_BYTES = 8
# Tag byte of the seal, which is first in place of the incarnation; protobuf accepts fields in any order.
_SEAL_TAG = 0x69


def decode_sealed(trailer: bytes, *, key: bytes, incarnation: int) -> Segment | None:
    """The segment that a sealed trailer describes. Returns None unless this key made the seal for this incarnation.

    The comparison takes as long for a seal that is almost right as for any other.
    """
    if len(trailer) != TRAILER_BYTES or not key:
        return None
    tag, sealed, *numbers = _TRAILER.unpack(trailer)
    if tag != _SEAL_TAG or tuple(numbers[::2]) != _TAGS[1:]:
        return None
    segment = Segment(*(incarnation, *numbers[1::2], key))
    matches = hmac.compare_digest(segment.seal.to_bytes(SEAL_BYTES, "little"), sealed.to_bytes(SEAL_BYTES, "little"))
    return segment if matches else None


def decode_trailer(trailer: bytes) -> Segment | None:
    """The segment that a trailer without a seal describes. Returns None if the bytes are not a whole trailer."""
    if len(trailer) != TRAILER_BYTES:
        return None
    numbers = _TRAILER.unpack(trailer)
    # A segment has exactly one trailer; this check also finds absent fields.
    return Segment(*numbers[1::2]) if numbers[::2] == _TAGS else None


def payload_bytes(spec: KVCacheSpec, *, layers: int, tokens: int, heads: int) -> int:
    return layers * tokens * spec.kv_factor * heads * spec.head_dim * spec.itemsize


class SegmentPiece(NamedTuple):
    """Some tokens in some layers, for all heads."""

    layers: range
    token_start: int
    token_stop: int


def cut(
    spec: KVCacheSpec,
    *,
    segment_bytes: int,
    layers: range,
    heads: int,
    token_start: int,
    token_stop: int,
    resume_at: int,
) -> Iterator[SegmentPiece]:
    """Cuts the KV of a token range that will be read into pieces of at most `segment_bytes` payload each.

    All layers in one piece if they fit; else as many layers of the whole range as fit; else one layer of part of it,
    because long runs of tokens are what gather and scatter copy fast.

    Args:
        layers, heads: the layers, and the number of heads, that one sender sends to one receiver.
        resume_at: first position that may still be computed. KV older than the sliding window is not sent.

    Raises:
        ConfigError: not even one token of one layer fits.
    """
    per_layer = payload_bytes(spec, layers=1, tokens=1, heads=heads)
    _check_fits(per_layer, segment_bytes)
    for box in read_boxes(spec, layers=layers, token_start=token_start, token_stop=token_stop, resume_at=resume_at):
        yield from _cut_box(box, per_layer, segment_bytes)


def read_boxes(
    spec: KVCacheSpec, *, layers: range, token_start: int, token_stop: int, resume_at: int
) -> Iterator[SegmentPiece]:
    """The KV of a token range that tokens from `resume_at` on will read, as boxes: one for each run of tokens that the
    same evenly spaced layers read."""
    if not spec.windows:  # the short path, because a link waits for the first piece
        if layers and token_start < token_stop:
            yield SegmentPiece(layers, token_start, token_stop)
        return
    first = {layer: max(token_start, spec.first_read(layer, resume_at)) for layer in layers}
    borders = sorted({start for start in first.values() if start < token_stop}) if token_start < token_stop else []
    for start, stop in pairwise([*borders, token_stop]):
        for run in _even_runs([layer for layer in layers if first[layer] <= start]):
            yield SegmentPiece(run, start, stop)


def _even_runs(layers: list[int]) -> Iterator[range]:
    """The layers as ranges: one if they are evenly spaced, else one for each run of adjacent layers."""
    steps = {second - first for first, second in pairwise(layers)}
    if len(steps) <= 1:
        step = steps.pop() if steps else 1
        yield range(layers[0], layers[-1] + 1, step)
        return
    start = layers[0]
    for layer, following in pairwise([*layers, -1]):
        if following != layer + 1:
            yield range(start, layer + 1)
            start = following


def _cut_box(box: SegmentPiece, per_layer: int, segment_bytes: int) -> Iterator[SegmentPiece]:
    num_tokens = box.token_stop - box.token_start
    layers_each = max(1, segment_bytes // (per_layer * num_tokens))
    tokens_each = segment_bytes // per_layer
    for first in range(0, len(box.layers), layers_each):
        layers = box.layers[first : first + layers_each]
        start = box.token_start
        while start < box.token_stop:
            stop = _next_cut(start, tokens_each, box.token_stop)
            yield SegmentPiece(layers, start, stop)
            start = stop


def check_segment_bytes(spec: KVCacheSpec, segment_bytes: int) -> None:
    """Raises ConfigError unless at least one token of one layer fits into a segment, and one head of a state."""
    _check_fits(max(part.least_segment_bytes for part in spec.parts), segment_bytes)


def _check_fits(least: int, segment_bytes: int) -> None:
    if segment_bytes < least:
        raise ConfigError(
            f"segment_bytes is {segment_bytes}, and one token of one layer has {least} bytes",
            field="segment_bytes",
            value=segment_bytes,
            allowed=(f"at least {least}",),
            cure="raise --segment-mib on both nodes",
        )


def _next_cut(start: int, tokens_each: int, token_stop: int) -> int:
    if token_stop - start <= tokens_each:
        return token_stop
    aligned = (start + tokens_each) // ALIGN_TOKENS * ALIGN_TOKENS
    return aligned if aligned > start else start + tokens_each
