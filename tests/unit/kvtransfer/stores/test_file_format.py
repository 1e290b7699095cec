"""Names and headers of the files of entries."""

import hashlib
import struct

import pytest

from kvtransfer.stores.file_format import HEADER_BYTES, EntryFileName, FileHeader, decode_header
from tests.unit.kvtransfer.stores.entries import entry_keys

KEY = entry_keys(300)[299]
HEADER = FileHeader(b"spec", KEY, 1 << 20)


def sealed(page: bytes) -> bytes:
    """A page in which only the checksum is right."""
    return page[:-16] + hashlib.blake2b(page[:-16], digest_size=16).digest()


def test_a_header_is_read_as_it_was_written() -> None:
    page = HEADER.encode()
    assert len(page) == HEADER_BYTES
    assert decode_header(page) == HEADER


def test_a_header_has_the_form_that_is_documented() -> None:
    """Changed here, VERSION must rise, and docs/kv-files.md must say what changed."""
    page = HEADER.encode()
    assert page[:8] == b"BATON-KV"
    assert struct.unpack_from("<6IQQ", page, 8) == (1, 4, 16, 16, 16, 256, 1 << 20, 299)
    filled = b"".join((b"spec", KEY.block.digest, KEY.block.parent, KEY.root, KEY.block.tokens))
    assert page[48 : 48 + len(filled)] == filled
    assert not any(page[48 + len(filled) : -16])
    assert sealed(page) == page


@pytest.mark.parametrize("bit", range(0, 8 * HEADER_BYTES, 509))
def test_no_flipped_bit_passes(bit: int) -> None:
    page = bytearray(HEADER.encode())
    page[bit // 8] ^= 1 << bit % 8
    assert decode_header(bytes(page)) is None


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, b"other-kv"), (8, b"\0\0\0\0"), (8, b"\2\0\0\0"), (12, b"\xff\xff\xff\xff"), (24, b"\0\0\0\0"), (4000, b"x")],
    ids=["magic", "older version", "newer version", "huge size", "smaller size", "padding"],
)
def test_a_header_of_another_form_is_none_even_with_a_right_checksum(at: int, value: bytes) -> None:
    page = bytearray(HEADER.encode())
    page[at : at + len(value)] = value
    assert decode_header(sealed(bytes(page))) is None


@pytest.mark.parametrize("size", [0, 47, HEADER_BYTES - 1, HEADER_BYTES + 1])
def test_a_page_of_another_size_is_none(size: int) -> None:
    assert decode_header(HEADER.encode().ljust(size, b"\0")[:size]) is None


def test_a_name_is_read_as_it_was_written() -> None:
    name = EntryFileName.of(KEY)
    assert EntryFileName.parse(str(name)) == name
    assert (name.digest, name.parent, name.root, name.number) == (KEY.block.digest, KEY.block.parent, KEY.root, 299)
    assert len(str(name)) < 128


@pytest.mark.parametrize(
    "text",
    [
        *("", ".kv", "a.kv", "tmp-00", "00-11-22-3", "00-11-22.kv", "00-11-22-+3.kv", "00-11-22-0x3.kv"),
        *("00-11-22-03.kv", "0 0-11-22-3.kv", "00-11-22-3-4.kv", "AA-11-22-3.kv", "00-11-22--3.kv", "00-11-22-٣.kv"),
        "00-11-22-3.kv.kv",
    ],
)
def test_no_other_text_is_a_name(text: str) -> None:
    assert EntryFileName.parse(text) is None
