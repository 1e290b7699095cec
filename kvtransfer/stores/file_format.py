"""The form of a file that holds one entry: its name and its header; docs/kv-files.md documents both. Pure.

A file is a header of one page, then the entry. Reading it says nothing about the entry's own bytes: whoever uses them
checks the digest in the entry.
"""

import hashlib
import struct
from collections.abc import Container
from dataclasses import dataclass
from typing import Self

from baton.core.block_keys import BlockKey
from baton.core.kv_entries import EntryKey

MAGIC = b"BATON-KV"
VERSION = 1
# A page, so that the entry begins at one.
HEADER_BYTES = 4096
_CHECKSUM_BYTES = 16
# Magic, version, sizes of namespace, digest, parent, root and tokens; the entry's size and number.
_FIXED = struct.Struct("<8sI5IQQ")
_SUFFIX = ".kv"
# Begins the names of files that are being written.
TEMPORARY = "tmp-"


@dataclass(frozen=True)
class FileHeader:
    """What a file says that it holds.

    Attributes:
        namespace: equal for all entries that a rank can read.
    """

    namespace: bytes
    key: EntryKey
    entry_bytes: int

    def encode(self) -> bytes:
        """The one header that says this, HEADER_BYTES bytes."""
        block = self.key.block
        texts = (self.namespace, block.digest, block.parent, self.key.root, block.tokens)
        fixed = _FIXED.pack(MAGIC, VERSION, *map(len, texts), self.entry_bytes, self.key.number)
        filled = b"".join((fixed, *texts))
        assert len(filled) <= HEADER_BYTES - _CHECKSUM_BYTES
        padded = filled.ljust(HEADER_BYTES - _CHECKSUM_BYTES, b"\0")
        return padded + _checksum(padded)


def decode_header(page: bytes) -> FileHeader | None:
    """The header that a file begins with. Returns None unless it is whole and of this version."""
    if len(page) != HEADER_BYTES or _checksum(page[:-_CHECKSUM_BYTES]) != page[-_CHECKSUM_BYTES:]:
        return None
    magic, version, *sizes, entry_bytes, number = _FIXED.unpack_from(page)
    if magic != MAGIC or version != VERSION or _FIXED.size + sum(sizes) > HEADER_BYTES - _CHECKSUM_BYTES:
        return None
    texts, start = [], _FIXED.size
    for size in sizes:
        texts.append(page[start : start + size])
        start += size
    namespace, digest, parent, root, tokens = texts
    header = FileHeader(namespace, EntryKey(BlockKey(digest, tokens, parent), root, number), entry_bytes)
    return header if header.encode() == page else None


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_CHECKSUM_BYTES).digest()


@dataclass(frozen=True, slots=True)
class EntryFileName:
    """Name of an entry's file. It has what a store must know of entries that it finds, so it need not open them."""

    digest: bytes
    parent: bytes
    root: bytes
    number: int

    @classmethod
    def of(cls, key: EntryKey) -> Self:
        return cls(key.block.digest, key.block.parent, key.root, key.number)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """What a name says. Returns None if it is not the name of an entry's file."""
        parts = text.removesuffix(_SUFFIX).split("-")
        try:
            digest, parent, root = map(bytes.fromhex, parts[:3])
            name = cls(digest, parent, root, int(parts[3], 16))
        except (ValueError, IndexError):
            return None
        return name if str(name) == text else None

    def __str__(self) -> str:
        return f"{self.digest.hex()}-{self.parent.hex()}-{self.root.hex()}-{self.number:x}{_SUFFIX}"


def may_have_root(name: str, roots: Container[str]) -> bool:
    """Whether a file may have an entry with one of these roots, in hexadecimal, as far as its name says. A file that is
    being written may."""
    parts = name.split("-", 3)
    return name.startswith(TEMPORARY) or (len(parts) > 3 and parts[2] in roots)
