"""Targets: the files in which a node keeps KV, with any bytes and any names."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from kvtransfer.stores.file_format import HEADER_BYTES, EntryFileName, FileHeader, decode_header
from kvtransfer.stores.files import FileStore
from tests.fuzz import mutate
from tests.fuzz.folders import in_folders
from tests.fuzz.target import Case, Targets
from tests.unit.kvtransfer.stores.entries import entry_keys

_ENTRY_BYTES = 100
_NAMESPACE = b"spec"
_KEYS = entry_keys(2)
_HEADERS = [FileHeader(_NAMESPACE, key, _ENTRY_BYTES).encode() for key in _KEYS]
_NAME = str(EntryFileName.of(_KEYS[0]))
_CHECKSUM_BYTES = 16


def make_kv_file(random: Random) -> Case:
    header = random.choice(_HEADERS)
    if random.random() < 0.5:
        # Most of a header is padding; only its begin says something.
        header = mutate.data(random, header[:400]) + header[400:]
    if random.random() < 0.8:
        header = _sealed(header[:-_CHECKSUM_BYTES].ljust(HEADER_BYTES - _CHECKSUM_BYTES, b"\0"))
    file = header + bytes(_ENTRY_BYTES)
    return file if random.random() < 0.8 else mutate.data(random, file), mutate.text(random, _NAME).encode()


def kv_file(folder: Path, case: Case) -> str:
    """A file in the place of an entry's, and its name."""
    data, name = case[0], case[1].decode(errors="replace")
    parsed = EntryFileName.parse(name)
    assert parsed is None or str(parsed) == name
    header = decode_header(data[:HEADER_BYTES])
    assert header is None or header.encode() == data[:HEADER_BYTES]
    store = FileStore(folder, namespace=_NAMESPACE, entry_bytes=_ENTRY_BYTES, max_bytes=1 << 20)
    try:
        (place,) = folder.glob("v*")
        (place / _NAME).write_bytes(data)
        is_read = store.get(_KEYS[0], memoryview(bytearray(_ENTRY_BYTES)))
        assert is_read == (data[:HEADER_BYTES] == _HEADERS[0] and len(data) == HEADER_BYTES + _ENTRY_BYTES)
        assert store.counters().damaged == (not is_read)
        assert (place / _NAME).exists() == is_read
        store.drop(_KEYS[:1])
    finally:
        store.close()
    return "read" if is_read else "refused no header" if header is None else "refused another header"


def _sealed(data: bytes) -> bytes:
    """A page with a right checksum."""
    page = data[: HEADER_BYTES - _CHECKSUM_BYTES]
    return page + hashlib.blake2b(page, digest_size=_CHECKSUM_BYTES).digest()


@contextmanager
def kv_file_targets() -> Iterator[Targets]:
    with in_folders([(make_kv_file, kv_file)]) as targets:
        yield targets
