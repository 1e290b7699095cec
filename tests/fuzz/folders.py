"""Targets that read files."""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random

from tests.fuzz.target import Case, Target, Targets


@contextmanager
def in_folders(
    made: Iterable[tuple[Callable[[Random], Case], Callable[[Path, Case], str | None]]],
) -> Iterator[Targets]:
    """Each target with a folder of its own, in memory where that is possible."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as base:
        targets: dict[str, Target] = {}
        for make, parse in made:
            folder = Path(base) / parse.__name__
            folder.mkdir()
            targets[parse.__name__] = Target(make, partial(parse, folder))
        yield targets
