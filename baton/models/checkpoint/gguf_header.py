"""Reads the header of a GGUF file: metadata, and the place of each tensor. It reads no weights and knows no model.

The file is little endian: magic, version, number of tensors, number of metadata entries, the entries, the tensors'
descriptions, and after padding the data. All bytes are untrusted.
"""

import hashlib
import math
import os
import stat
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO

from baton.core.errors import ConfigError, shortened

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = "general.alignment"
_DEFAULT_ALIGNMENT = 32
_ALIGNMENT_MAX = 1 << 20
_HEADER_BYTES_MAX = 256 << 20
_ENTRIES_MAX = 1 << 16
_ELEMENTS_MAX = 1 << 22  # of one list; the largest vocabularies have 2**18 tokens
_TENSORS_MAX = 1 << 20
_DIMS_MAX = 4
_SIZE_MAX = 2**63 - 1
_NUMBERS = MappingProxyType({0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"})
_STRING, _ARRAY = 8, 9

MetadataValue = bool | int | float | str | tuple[bool | int | float | str, ...]


@dataclass(frozen=True)
class GgufType:
    """How numbers are stored: `block_bytes` bytes for each `block_size` neighbours of a row."""

    name: str
    block_size: int
    block_bytes: int


# The types that Baton reads, by their numbers in files.
GGUF_TYPES: Mapping[int, GgufType] = MappingProxyType(
    {
        0: GgufType("F32", 1, 4),
        1: GgufType("F16", 1, 2),
        2: GgufType("Q4_0", 32, 18),
        3: GgufType("Q4_1", 32, 20),
        6: GgufType("Q5_0", 32, 22),
        7: GgufType("Q5_1", 32, 24),
        8: GgufType("Q8_0", 32, 34),
        12: GgufType("Q4_K", 256, 144),
        13: GgufType("Q5_K", 256, 176),
        14: GgufType("Q6_K", 256, 210),
        30: GgufType("BF16", 1, 2),
    }
)
# Names of the others, for errors.
_OTHER_TYPES = MappingProxyType(
    {
        **{10: "Q2_K", 11: "Q3_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL"},
        **{21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
        **{29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"},
    }
)


@dataclass(frozen=True)
class GgufTensor:
    """A tensor's place: `shape` has the rows' length last, `start` and `stop` are byte offsets in the file."""

    name: str
    type: GgufType
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class GgufHeader:
    """One file's header. `sha256` is over all its bytes, in hex."""

    path: Path
    sha256: str
    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, GgufTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """Reads the header of the file at `path`.

    Raises:
        ConfigError: the file cannot be read, is damaged or cut off, or has a tensor of an unsupported type.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # O_NONBLOCK: a pipe must not block
        with os.fdopen(descriptor, "rb", buffering=1 << 20) as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise damaged(path, "is not a regular file")
            return _read(path, _Cursor(path, file, status.st_size))
    except OSError as error:
        raise damaged(path, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise damaged(path, "has a text that is no UTF-8") from error


class _Cursor:
    """Reads values one after another, and refuses what is beyond the file's end or the limit of headers."""

    def __init__(self, path: Path, file: IO[bytes], size_bytes: int) -> None:
        self._path, self._file = path, file
        self.position, self.size_bytes = 0, size_bytes
        self._end = min(size_bytes, _HEADER_BYTES_MAX)

    def bytes(self, count: int) -> bytes:
        if count > self._end - self.position:
            why = "is cut off within its header" if self._end == self.size_bytes else "has a header that is too large"
            raise damaged(self._path, why)
        data = self._file.read(count)
        if len(data) < count:
            raise damaged(self._path, "is cut off within its header")
        self.position += count
        return data

    def sha256(self) -> str:
        """Returns the digest of all bytes before this place."""
        self._file.seek(0)
        return hashlib.sha256(self._file.read(self.position)).hexdigest()

    def number(self, code: str) -> bool | int | float:
        (value,) = struct.unpack(f"<{code}", self.bytes(struct.calcsize(f"<{code}")))
        assert isinstance(value, bool | int | float)
        return value

    def count(self, most: int, what: str) -> int:
        value = int.from_bytes(self.bytes(8), "little")
        if value > most:
            raise damaged(self._path, f"says that it has {value} {what}")
        return value

    def text(self) -> str:
        return self.bytes(int.from_bytes(self.bytes(8), "little")).decode()

    def numbers(self, code: str, count: int) -> tuple[bool | int | float, ...]:
        return struct.unpack(f"<{count}{code}", self.bytes(count * struct.calcsize(f"<{code}")))


def _read(path: Path, cursor: _Cursor) -> GgufHeader:
    if cursor.size_bytes < len(_MAGIC) or cursor.bytes(len(_MAGIC)) != _MAGIC:
        raise damaged(path, "is no GGUF file")
    version = int(cursor.number("I"))
    if version not in _VERSIONS:
        raise ConfigError(
            f"{path} has version {version} of GGUF",
            field="model",
            value=version,
            allowed=tuple(map(str, _VERSIONS)),
            cure="convert the model again with a current llama.cpp, for a little-endian machine",
        )
    num_tensors = cursor.count(_TENSORS_MAX, "tensors")
    num_entries = cursor.count(_ENTRIES_MAX, "entries of metadata")
    metadata: dict[str, MetadataValue] = {}
    for _ in range(num_entries):
        name = cursor.text()
        if name in metadata:
            raise damaged(path, f"has the entry {shortened(name, 80)!r} twice")
        metadata[name] = _value(path, cursor)
    alignment = metadata.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= _ALIGNMENT_MAX:
        raise damaged(path, f"has the {_ALIGNMENT} {shortened(str(alignment), 80)}")
    described = [_describe(path, cursor) for _ in range(num_tensors)]
    data_start = -(-cursor.position // alignment) * alignment
    tensors = _placed(path, described, data_start, cursor.size_bytes)
    return GgufHeader(path, cursor.sha256(), MappingProxyType(metadata), tensors)


def _value(path: Path, cursor: _Cursor) -> MetadataValue:
    kind = int(cursor.number("I"))
    if kind == _STRING:
        return cursor.text()
    if kind in _NUMBERS:
        return cursor.number(_NUMBERS[kind])
    if kind != _ARRAY:
        raise damaged(path, f"has metadata of the unknown type {kind}")
    of = int(cursor.number("I"))
    count = cursor.count(_ELEMENTS_MAX, "elements in an array of its metadata")
    if of == _STRING:
        return tuple([cursor.text() for _ in range(count)])
    if of not in _NUMBERS:  # arrays of arrays exist in the format, and no model has them
        raise damaged(path, f"has metadata of the unknown array type {of}")
    return cursor.numbers(_NUMBERS[of], count)


@dataclass(frozen=True)
class _Description:
    name: str
    type: GgufType
    shape: tuple[int, ...]
    offset: int


def _describe(path: Path, cursor: _Cursor) -> _Description:
    name = cursor.text()
    shown = shortened(name, 80)
    num_dims = int(cursor.number("I"))
    if not 0 < num_dims <= _DIMS_MAX:
        raise damaged(path, f"says that {shown!r} has {num_dims} dimensions")
    shape = tuple(cursor.count(_SIZE_MAX, f"numbers along a dimension of {shown!r}") for _ in range(num_dims))[::-1]
    number = int(cursor.number("I"))
    offset = cursor.count(_SIZE_MAX, f"bytes before {shown!r}")
    if number not in GGUF_TYPES:
        raise ConfigError(
            f"{path}: {shown} has the type {_OTHER_TYPES.get(number, number)}",
            field="model",
            value=_OTHER_TYPES.get(number, number),
            allowed=tuple(each.name for each in GGUF_TYPES.values()),
            cure="take a file of another quantization, such as Q4_K_M or Q8_0",
        )
    kind = GGUF_TYPES[number]
    if shape[-1] % kind.block_size:
        raise damaged(path, f"says that {shown!r} has rows of {shape[-1]} numbers in {kind.name}")
    return _Description(name, kind, shape, offset)


def _placed(path: Path, described: list[_Description], data_start: int, size_bytes: int) -> dict[str, GgufTensor]:
    """Returns the tensors by name, after it has checked that they lie in the file one after another."""
    tensors: dict[str, GgufTensor] = {}
    stop = data_start
    for each in sorted(described, key=lambda each: each.offset):
        start = data_start + each.offset
        if start < stop or each.name in tensors:
            raise damaged(path, f"has the tensor {shortened(each.name, 80)!r} twice, or over another one")
        stop = start + math.prod(each.shape) // each.type.block_size * each.type.block_bytes
        if stop > size_bytes:
            raise damaged(path, f"has {size_bytes} bytes, and {shortened(each.name, 80)!r} ends at byte {stop}")
        tensors[each.name] = GgufTensor(each.name, each.type, each.shape, start, stop)
    return tensors


def read_numbers(tensor: GgufTensor, path: Path, *, most: int) -> tuple[float, ...]:
    """Reads a short tensor of F32, such as the factors of a rotary embedding.

    Raises:
        ConfigError: it has another type or more than `most` numbers, or cannot be read.
    """
    if tensor.type.name != "F32" or math.prod(tensor.shape) > most:
        raise damaged(path, f"has {tensor.name} as {tensor.type.name} {list(tensor.shape)}")
    numbers = array("f")
    try:
        with path.open("rb") as file:
            file.seek(tensor.start)
            numbers.frombytes(file.read(tensor.stop - tensor.start))
    except (OSError, ValueError) as error:
        raise damaged(path, f"cannot be read: {error}") from error
    return tuple(numbers)


def damaged(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"{path} {problem}", field="model", value=str(path), cure="download the file again")
