"""The input that a process works on, in memory that its parent can read after the process has died."""

import mmap
import struct
from pathlib import Path
from typing import Self

from tests.fuzz.target import Case

_BYTES = 1 << 20
_HEAD = struct.Struct("<qI")  # seed, number of parts


class Shared:
    """One process writes, another reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _BYTES)

    @classmethod
    def create(cls, path: Path) -> Self:
        path.write_bytes(_HEAD.pack(-1, 0) + bytes(_BYTES - _HEAD.size))
        return cls(path)

    def set(self, seed: int, case: Case) -> None:
        """Parts of an input that is too large are left out."""
        written = _HEAD.size
        count = 0
        for part in case:
            if written + 4 + len(part) > _BYTES:
                break
            self._memory[written : written + 4 + len(part)] = struct.pack("<I", len(part)) + part
            written += 4 + len(part)
            count += 1
        _HEAD.pack_into(self._memory, 0, seed, count)

    @property
    def seed(self) -> int:
        """-1: there is no input yet."""
        return int(_HEAD.unpack_from(self._memory, 0)[0])

    @property
    def case(self) -> Case:
        parts, place = [], _HEAD.size
        for _ in range(_HEAD.unpack_from(self._memory, 0)[1]):
            (length,) = struct.unpack_from("<I", self._memory, place)
            parts.append(bytes(self._memory[place + 4 : place + 4 + length]))
            place += 4 + length
        return tuple(parts)
