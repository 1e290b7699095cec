"""Tags, trailers, and the cutting of token ranges into messages."""

from dataclasses import asdict, fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import ConfigError, InternalError
from baton.kvcache.spec import KVCacheSpec, KVKind
from baton.protos.internal.v1 import lease_pb2
from kvtransfer.leases import LeaseGrant
from kvtransfer.records import SendJob
from kvtransfer.segments import (
    DIGEST_BYTES,
    DIGEST_OFFSET,
    LEASE_KEY_BYTES,
    TRAILER_BYTES,
    WARM_UP,
    Segment,
    SegmentPiece,
    Tag,
    cut,
    decode_sealed,
    decode_trailer,
    payload_bytes,
    trailer_over,
)

SEGMENT = Segment(2**64 - 1, 77, 3, 0, 4, 16, 32, 0, 2, 4096)

tags = st.builds(Tag, st.integers(0, 2**12 - 1), st.integers(0, 2**36 - 1), st.integers(0, WARM_UP))
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
segments = st.builds(Segment, u64, u64, u32, u32, u32, u32, u32, u32, u32, u64, u64, u32)


def to_proto(segment: Segment) -> lease_pb2.Segment:
    values = asdict(segment)
    del values["key"]
    return lease_pb2.Segment(**values)


@settings(deadline=None)
@given(tags, tags)
def test_different_tags_are_different_numbers_and_come_back_whole(one: Tag, other: Tag) -> None:
    assert Tag.unpack(one.pack()) == one
    assert (one.pack() == other.pack()) == (one == other)
    assert 0 <= one.pack() < 2**64


@pytest.mark.parametrize("parts", [(2**12, 0, 0), (0, 2**36, 0), (0, 0, 2**16), (-1, 0, 0)])
def test_a_part_that_does_not_fit_is_an_error(parts: tuple[int, int, int]) -> None:
    with pytest.raises(InternalError, match="a tag's"):
        Tag(*parts)


@settings(deadline=None)
@given(segments)
def test_every_trailer_has_the_same_size_and_comes_back_whole(segment: Segment) -> None:
    assert len(segment.encode(segment.digest)) == TRAILER_BYTES
    assert decode_trailer(segment.encode(segment.digest)) == segment


@settings(deadline=None)
@given(segments, st.integers(0, 2**64 - 1))
def test_the_trailer_of_a_segment_without_key_can_be_made_without_the_segment(segment: Segment, digest: int) -> None:
    named = replace(segment, incarnation=0, layer_step=max(1, segment.layer_step))
    trailer = trailer_over(
        digest,
        lease=named.lease,
        number=named.number,
        layers=named.layers,
        token_start=named.token_start,
        token_stop=named.token_stop,
        heads=named.heads,
        payload_bytes=named.payload_bytes,
    )
    assert trailer == named.encode(named.digest_over(digest))


@settings(deadline=None)
@given(segments)
def test_a_trailer_equals_protobufs_encoding(segment: Segment) -> None:
    trailer = to_proto(segment).SerializeToString(deterministic=True)
    assert segment.encode(segment.digest) == trailer
    assert trailer[DIGEST_OFFSET:][:DIGEST_BYTES] == segment.digest.to_bytes(8, "little")


@settings(deadline=None)
@given(segments, st.integers(0, TRAILER_BYTES - 1), st.integers(1, 255))
def test_a_damaged_trailer_is_none_or_another_segment(segment: Segment, position: int, damage: int) -> None:
    trailer = bytearray(segment.encode(segment.digest))
    trailer[position] ^= damage
    decoded = decode_trailer(bytes(trailer))
    assert decoded is None or (decoded != segment and decoded.encode(decoded.digest) == trailer)


@settings(deadline=None)
@given(segments, u64, u64)
def test_a_digest_is_a_sum_so_that_its_two_parts_may_come_in_any_order(segment: Segment, part: int, rest: int) -> None:
    assert segment.digest_over((part + rest) % 2**64) == ((segment.summand + part) % 2**64 + rest) % 2**64


@settings(deadline=None)
@given(st.binary(max_size=2 * TRAILER_BYTES))
def test_bytes_that_are_no_trailer_are_detected(noise: bytes) -> None:
    segment = decode_trailer(noise)
    assert segment is None or segment.encode(segment.digest) == noise


def test_a_trailer_that_lacks_a_field_is_invalid() -> None:
    message = to_proto(SEGMENT)
    message.ClearField("head_stop")
    assert decode_trailer(message.SerializeToString()) is None
    assert decode_trailer(b"") is None


def test_the_digest_covers_the_payload_and_every_other_field() -> None:
    digest = SEGMENT.digest_over(123)
    assert replace(SEGMENT, digest=digest).digest_over(123) == digest
    names = [field.name for field in fields(Segment) if field.name not in ("digest", "key")]
    others = [replace(SEGMENT, **{name: getattr(SEGMENT, name) ^ 1}).digest_over(123) for name in names]
    others.append(SEGMENT.digest_over(124))
    assert len(set(others)) == len(others)
    assert digest not in {*others, 0}


keys = st.binary(min_size=LEASE_KEY_BYTES, max_size=LEASE_KEY_BYTES)


@settings(deadline=None)
@given(segments, keys)
def test_a_sealed_trailer_comes_back_whole_and_is_a_segment_of_protobuf(segment: Segment, key: bytes) -> None:
    sealed = replace(segment, key=key)
    trailer = sealed.encode(segment.digest)
    assert decode_sealed(trailer, key=key, incarnation=segment.incarnation) == sealed
    expected = to_proto(segment)
    expected.ClearField("incarnation")
    expected.seal = sealed.seal
    assert lease_pb2.Segment.FromString(trailer) == expected
    assert trailer[DIGEST_OFFSET:][:DIGEST_BYTES] == segment.digest.to_bytes(8, "little")


@settings(deadline=None)
@given(segments, keys, st.integers(0, TRAILER_BYTES - 1), st.integers(1, 255))
def test_a_damaged_sealed_trailer_is_none_unless_only_the_digest_is_damaged(
    segment: Segment, key: bytes, position: int, damage: int
) -> None:
    trailer = bytearray(replace(segment, key=key).encode(segment.digest))
    trailer[position] ^= damage
    decoded = decode_sealed(bytes(trailer), key=key, incarnation=segment.incarnation)
    if position in range(DIGEST_OFFSET, DIGEST_OFFSET + DIGEST_BYTES):
        assert decoded is not None
        assert decoded.digest != segment.digest
    else:
        assert decoded is None


@settings(deadline=None)
@given(segments, keys, keys, u64)
def test_another_leases_key_another_incarnation_and_no_key_never_open_a_seal(
    segment: Segment, key: bytes, other: bytes, incarnation: int
) -> None:
    trailer = replace(segment, key=key).encode(segment.digest)
    assert (decode_sealed(trailer, key=other, incarnation=segment.incarnation) is None) == (key != other)
    assert (decode_sealed(trailer, key=key, incarnation=incarnation) is None) == (incarnation != segment.incarnation)
    assert decode_sealed(trailer, key=b"", incarnation=segment.incarnation) is None
    assert decode_trailer(trailer) is None
    assert decode_sealed(segment.encode(segment.digest), key=key, incarnation=segment.incarnation) is None


def test_a_key_is_not_shown() -> None:
    key = b"k" * LEASE_KEY_BYTES
    assert "kkk" not in repr(replace(SEGMENT, key=key))
    assert "kkk" not in repr(LeaseGrant(1, (), 0, 0, key=key))
    assert "kkk" not in repr(SendJob(1, 1, 1, 1, 0, 0, 0, 0, (), key=key))


def pieces_of(
    spec: KVCacheSpec, segment_bytes: int, start: int, stop: int, *, resume_at: int | None = None
) -> list[SegmentPiece]:
    """All layers and heads of a token range."""
    return list(
        cut(
            spec,
            segment_bytes=segment_bytes,
            layers=range(spec.num_layers),
            heads=spec.num_kv_heads,
            token_start=start,
            token_stop=stop,
            resume_at=stop if resume_at is None else resume_at,
        )
    )


@st.composite
def specs(draw: st.DrawFn) -> KVCacheSpec:
    num_layers = draw(st.integers(1, 7))
    windows = draw(st.lists(st.sampled_from([0, 1, 40, 150]), min_size=num_layers, max_size=num_layers))
    return KVCacheSpec(
        KVKind.GQA,
        num_layers=num_layers,
        num_kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([4, 8])),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        windows=tuple(windows) if any(windows) else (),
    )


@settings(deadline=None)
@given(specs(), st.integers(0, 300), st.integers(0, 300), st.integers(0, 60), st.integers(0, 20_000))
def test_pieces_fit_and_have_all_kv_that_is_read_later_once(
    spec: KVCacheSpec, token_start: int, num_tokens: int, later: int, spare_bytes: int
) -> None:
    segment_bytes = spec.bytes_per_token_layer + spare_bytes
    token_stop = token_start + num_tokens
    resume_at = token_stop + later
    covered: set[tuple[int, int]] = set()
    for layers, start, stop in pieces_of(spec, segment_bytes, token_start, token_stop, resume_at=resume_at):
        size = payload_bytes(spec, layers=len(layers), tokens=stop - start, heads=spec.num_kv_heads)
        assert 0 < size <= segment_bytes
        cells = {(layer, token) for layer in layers for token in range(start, stop)}
        assert not cells & covered
        covered |= cells
    assert covered == {
        (layer, token)
        for layer, window in enumerate(spec.windows or (0,) * spec.num_layers)
        for token in range(token_start, token_stop)
        if not window or resume_at - token < window  # the query at `resume_at` sees itself and the window - 1 before it
    }


SPEC = KVCacheSpec(KVKind.GQA, num_layers=8, num_kv_heads=2, head_dim=8, dtype="float32")
ONE = SPEC.bytes_per_token_layer


def test_all_layers_go_in_one_piece_if_they_fit() -> None:
    assert pieces_of(SPEC, 8 * 100 * ONE, 5, 105) == [(range(8), 5, 105)]


def test_else_as_many_layers_of_all_tokens_as_fit() -> None:
    pieces = pieces_of(SPEC, 3 * 100 * ONE, 0, 100)
    assert pieces == [(range(3), 0, 100), (range(3, 6), 0, 100), (range(6, 8), 0, 100)]


def test_else_one_layer_of_part_of_the_tokens_with_inner_cuts_on_round_positions() -> None:
    pieces = pieces_of(SPEC, 150 * ONE, 10, 300)
    assert pieces[:3] == [(range(1), 10, 128), (range(1), 128, 256), (range(1), 256, 300)]
    assert len(pieces) == 8 * 3


@pytest.mark.parametrize(
    ("windows", "full"),
    [((30, 0) * 4, [range(1, 8, 2)]), ((30, 30, 30, 30, 30, 0, 30, 30), [range(5, 6)]), ((0, 0, 30, 0) * 2, None)],
)
def test_layers_without_a_window_go_together_also_where_others_lie_between_them(
    windows: tuple[int, ...], full: list[range] | None
) -> None:
    pieces = pieces_of(replace(SPEC, windows=windows), 8 * 100 * ONE, 0, 100)
    early = [piece.layers for piece in pieces if piece.token_stop == 71]
    assert early == (full or [range(2), range(3, 6), range(7, 8)])
    assert pieces[len(early) :] == [(range(8), 71, 100)]


@pytest.mark.parametrize("layers", [range(8), range(3, 4), range(1, 8, 3), range(4, 4)], ids=str)
@pytest.mark.parametrize(("start", "stop"), [(0, 0), (7, 8), (5, 300)])
def test_windows_beyond_every_context_change_nothing(layers: range, start: int, stop: int) -> None:
    one, other = (
        cut(spec, segment_bytes=40 * ONE, layers=layers, heads=2, token_start=start, token_stop=stop, resume_at=stop)
        for spec in (SPEC, replace(SPEC, windows=(10_000,) * 8))
    )
    pieces = list(one)
    assert pieces == list(other)
    assert sum(len(piece.layers) * (piece.token_stop - piece.token_start) for piece in pieces) == len(layers) * (
        stop - start
    )


def test_a_segment_that_cannot_hold_one_token_of_one_layer_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="segment_bytes"):
        pieces_of(SPEC, ONE - 1, 0, 1)
