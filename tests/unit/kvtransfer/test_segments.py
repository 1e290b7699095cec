"""Tags, trailers, and the cutting of token ranges into messages."""

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.spec import KVCacheSpec, KVKind
from baton.errors import ConfigError, InternalError
from kvtransfer.segments import TRAILER_BYTES, WARM_UP, Segment, Tag, cut, decode_trailer, payload_bytes

SEGMENT = Segment(2**64 - 1, 77, 3, 0, 4, 16, 32, 0, 2, 4096)

tags = st.builds(Tag, st.integers(0, 2**12 - 1), st.integers(0, 2**36 - 1), st.integers(0, WARM_UP))
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
segments = st.builds(Segment, u64, u64, u32, u32, u32, u32, u32, u32, u32, u64, u64)


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
    assert len(segment.encode()) == TRAILER_BYTES
    assert decode_trailer(segment.encode()) == segment


@settings(deadline=None)
@given(st.binary(max_size=2 * TRAILER_BYTES))
def test_bytes_that_are_no_trailer_are_found_out(noise: bytes) -> None:
    segment = decode_trailer(noise)
    assert segment is None or segment.encode() == noise


def test_a_trailer_without_one_field_is_none() -> None:
    message = SEGMENT.to_proto()
    message.ClearField("head_stop")
    assert decode_trailer(message.SerializeToString()) is None
    assert decode_trailer(b"") is None


def test_the_digest_covers_the_payload_and_every_other_field() -> None:
    sealed = SEGMENT.sealed(123)
    assert sealed.sealed(123) == sealed
    names = [field.name for field in fields(Segment) if field.name != "digest"]
    others = [replace(SEGMENT, **{name: getattr(SEGMENT, name) ^ 1}).sealed(123) for name in names]
    others.append(SEGMENT.sealed(124))
    digests = {other.digest for other in others}
    assert len(digests) == len(others)
    assert sealed.digest not in digests | {0}


specs = st.builds(
    KVCacheSpec,
    st.just(KVKind.GQA),
    num_layers=st.integers(1, 5),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([4, 8]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)


@settings(deadline=None)
@given(specs, st.integers(0, 300), st.integers(0, 300), st.integers(0, 20_000))
def test_pieces_fit_and_cover_every_layer_and_token_once(
    spec: KVCacheSpec, token_start: int, num_tokens: int, spare_bytes: int
) -> None:
    segment_bytes = spec.bytes_per_token_layer + spare_bytes
    covered: set[tuple[int, int]] = set()
    for layers, start, stop in cut(
        spec, segment_bytes=segment_bytes, token_start=token_start, token_stop=token_start + num_tokens
    ):
        size = payload_bytes(spec, layers=len(layers), tokens=stop - start, heads=spec.num_kv_heads)
        assert 0 < size <= segment_bytes
        cells = {(layer, token) for layer in layers for token in range(start, stop)}
        assert not cells & covered
        covered |= cells
    assert len(covered) == spec.num_layers * num_tokens


SPEC = KVCacheSpec(KVKind.GQA, num_layers=8, num_kv_heads=2, head_dim=8, dtype="float32")
ONE = SPEC.bytes_per_token_layer


def test_all_layers_go_in_one_piece_if_they_fit() -> None:
    assert list(cut(SPEC, segment_bytes=8 * 100 * ONE, token_start=5, token_stop=105)) == [(range(8), 5, 105)]


def test_else_as_many_layers_of_all_tokens_as_fit() -> None:
    pieces = list(cut(SPEC, segment_bytes=3 * 100 * ONE, token_start=0, token_stop=100))
    assert pieces == [(range(3), 0, 100), (range(3, 6), 0, 100), (range(6, 8), 0, 100)]


def test_else_one_layer_of_part_of_the_tokens_with_inner_cuts_on_round_positions() -> None:
    pieces = list(cut(SPEC, segment_bytes=150 * ONE, token_start=10, token_stop=300))
    assert pieces[:3] == [(range(1), 10, 128), (range(1), 128, 256), (range(1), 256, 300)]
    assert len(pieces) == 8 * 3


def test_a_segment_that_cannot_hold_one_token_of_one_layer_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="segment_bytes"):
        list(cut(SPEC, segment_bytes=ONE - 1, token_start=0, token_stop=1))
