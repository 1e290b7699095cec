"""Finds a checkpoint's tensors from its files and their headers, safetensors or GGUF. It reads no weights."""

import json
import math
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeGuard

from baton.core.errors import ConfigError, shortened
from baton.models.checkpoint.gguf_tensors import GgufEncoding, find_tensors, gguf_files
from baton.models.config.file import ConfigFile

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_CONFIG_DTYPES = MappingProxyType({"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"})
_DTYPE_BYTES = MappingProxyType(
    {
        "F64": 8,
        "F32": 4,
        "F16": 2,
        "BF16": 2,
        "F8_E4M3": 1,
        "F8_E5M2": 1,
        "I64": 8,
        "I32": 4,
        "I16": 2,
        "I8": 1,
        "U8": 1,
    }
)
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_INT64_MAX = 2**63 - 1


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor. `name` is as in `file`; `start` and `stop` are byte offsets there; `dtype` is in the
    format's spelling, such as "BF16".

    Attributes:
        run_bytes, gap_bytes: for a part of a tensor, the length of each run of its bytes and of the gap after the run;
            0: it is contiguous.
        encoding: how bytes become numbers, in a GGUF file; None: they are the numbers.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    run_bytes: int = 0
    gap_bytes: int = 0
    encoding: GgufEncoding | None = None

    def part(self, dim: int, part: range) -> "StoredTensor":
        """Returns the entries in the range `part` along axis `dim` of a contiguous tensor."""
        assert not self.gap_bytes, "a part of a part"
        if self.encoding is not None:
            return self._part_of_encoded(self.encoding, dim, part)
        shape = (*self.shape[:dim], len(part), *self.shape[dim + 1 :])
        entry_bytes = math.prod(self.shape[dim + 1 :]) * _DTYPE_BYTES[self.dtype]
        run_bytes, row_bytes = len(part) * entry_bytes, self.shape[dim] * entry_bytes
        start = self.start + part.start * entry_bytes
        runs = math.prod(self.shape[:dim])
        if not run_bytes or runs == 1 or run_bytes == row_bytes:
            return replace(self, shape=shape, start=start, stop=start + runs * run_bytes)
        stop = start + (runs - 1) * row_bytes + run_bytes
        gap_bytes = row_bytes - run_bytes
        return replace(self, shape=shape, start=start, stop=stop, run_bytes=run_bytes, gap_bytes=gap_bytes)

    def _part_of_encoded(self, encoding: GgufEncoding, dim: int, part: range) -> "StoredTensor":
        """Returns a part in whole rows of the file. Blocks of numbers may lie across the borders of columns, so a
        reader takes the columns from decoded rows."""
        if dim == 0:
            start = self.start + part.start * encoding.row_bytes
            stop = self.start + part.stop * encoding.row_bytes
            return replace(self, shape=(len(part), *self.shape[1:]), start=start, stop=stop)
        assert dim == 1, "a matrix"
        assert encoding.columns is None, "a part of a part"
        shape = (self.shape[0], len(part))
        return replace(self, shape=shape, encoding=replace(encoding, columns=part))


def read_checkpoint(directory: Path) -> Mapping[str, StoredTensor]:
    """Returns every tensor of the checkpoint in `directory` by name, in the order of names.

    Raises:
        ConfigError: there are no weights, a file is missing or damaged, or the index contradicts the files.
    """
    single, index = directory / _SINGLE, directory / _INDEX
    if single.exists():
        return dict(sorted(read_file(single).items()))
    if not index.exists() and (parts := gguf_files(directory)):
        return {
            name: StoredTensor(
                tensor.name, file, tensor.type.name, tensor.shape, tensor.start, tensor.stop, encoding=how
            )
            for name, (file, tensor, how) in sorted(find_tensors(parts).items())
        }
    if not index.exists():
        raise ConfigError(
            f"{directory} has no weights",
            field="model",
            value=str(directory),
            allowed=(single.name, index.name),
            cure="convert other formats with save_pretrained(..., safe_serialization=True)",
        )
    file_of = _read_index(index)
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(file_of.values())):
        found = read_file(directory / file)
        tensors.update({name: tensor for name, tensor in found.items() if file_of.get(name, file) == file})
    for name, file in file_of.items():
        if name not in tensors or tensors[name].file.name != file:
            raise _damaged(index, f"says that {name} is in {file}, which does not have it")
    return dict(sorted(tensors.items()))


def stored_dtype(directory: Path) -> str | None:
    """Returns the dtype of the largest tensor that is not quantized, in config.json's spelling; None if there is none.

    Raises:
        ConfigError: as `read_checkpoint`.
    """
    if not any((directory / name).exists() for name in (_SINGLE, _INDEX)):
        return None
    plain = (tensor for tensor in read_checkpoint(directory).values() if tensor.dtype in _CONFIG_DTYPES)
    largest = max(plain, key=lambda tensor: tensor.stop - tensor.start, default=None)
    return None if largest is None else _CONFIG_DTYPES[largest.dtype]


def _read_index(path: Path) -> dict[str, str]:
    weight_map = ConfigFile.read(path).raw("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _damaged(path, "has no weight_map")
    for name, file in weight_map.items():
        # NOTE: a name with a separator could point outside the checkpoint.
        if not isinstance(file, str) or Path(file).name != file:
            raise _damaged(path, f"maps {name} to {file!r}, which is not a file name")
    return weight_map


def read_file(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of one safetensors file, by name. The file begins with the header's length, 8 bytes little
    endian, and the header, a JSON object.

    Raises:
        ConfigError: the file cannot be read, or is damaged.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # O_NONBLOCK: a pipe must not block
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise _damaged(path, "is not a regular file")
            size_bytes = status.st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                raise _damaged(path, "is cut off within its first 8 bytes")
            (header_bytes,) = struct.unpack("<Q", prefix)
            if header_bytes > min(_MAX_HEADER_BYTES, size_bytes - 8):
                raise _damaged(path, f"is not a safetensors file, or cut off: the header would have {header_bytes} B")
            header = json.loads(file.read(header_bytes), object_pairs_hook=_without_twins)
    except OSError as error:
        raise _damaged(path, f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"has a header that is not JSON: {error}") from error
    tensors = _parse_header(path, header, data_start=8 + header_bytes)
    _check_places(path, tensors, data_start=8 + header_bytes, size_bytes=size_bytes)
    return tensors


def _check_places(path: Path, tensors: Mapping[str, StoredTensor], *, data_start: int, size_bytes: int) -> None:
    """Checks that tensors follow each other, each as large as its shape says, from the header to the file's end."""
    stop = data_start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.stop)):
        item_bytes = _DTYPE_BYTES.get(tensor.dtype)
        size = tensor.stop - tensor.start
        # A dtype unknown here has an unknown size, but no tensor ends before it starts.
        fits = size >= 0 if item_bytes is None else size == math.prod(tensor.shape) * item_bytes
        if tensor.start != stop or not fits:
            raise _damaged(
                path, f"says that {tensor.name}, {tensor.dtype} {list(tensor.shape)}, is {tensor.start}..{tensor.stop}"
            )
        stop = tensor.stop
    if stop != size_bytes:
        raise _damaged(path, f"has {size_bytes} bytes where its header says {stop}")


def _parse_header(path: Path, header: object, *, data_start: int) -> dict[str, StoredTensor]:
    problem = _damaged(path, "has a header that does not follow the safetensors format")
    if not isinstance(header, dict):
        raise problem
    tensors: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if not isinstance(entry, dict):
            raise problem
        dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        if not (isinstance(dtype, str) and _are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
            raise problem
        start, stop = offsets
        tensors[name] = StoredTensor(name, path, dtype, tuple(shape), data_start + start, data_start + stop)
    return tensors


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(each) is int and 0 <= each <= _INT64_MAX for each in value)


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds a dict of JSON pairs. Raises ValueError if two entries share a name, because only the last would count."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twin = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it names {shortened(twin, 80)!r} twice")
    return values


def _damaged(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"{path} {problem}", field="model", value=str(path), cure="download the checkpoint again")
