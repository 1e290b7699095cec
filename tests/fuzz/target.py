"""Fuzz targets and their oracle: an input is accepted, or refused with an error of ours, in bounded time and memory."""

import hashlib
import json
import re
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from baton.core.errors import BatonError, InternalError
from tests.fuzz import mutate

# Of one input, which takes a few milliseconds at most. CPU time, so a busy machine changes nothing.
CPU_S_MAX = 5.0
GROWTH_BYTES_MAX = 1 << 30  # of the whole run
ERROR_CHARS_MAX = 30_000
CORPUS = Path(__file__).parent / "corpus"

_POOL_MAX = 200
_POOL_BYTES_MAX = 4096  # of one input
_OUTCOME_CHARS = 120
_VALUES = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|0x[0-9a-f]+|[-+]?\d[\d.,e+-]*")

Case = tuple[bytes, ...]


@dataclass(frozen=True)
class Target:
    """A parser.

    Attributes:
        make: draws an input.
        parse: takes an input; returns what became of it, or None.
    """

    make: Callable[[Random], Case]
    parse: Callable[[Case], str | None]


@dataclass(frozen=True)
class AsyncTarget:
    """As `Target`, of code that runs on an event loop."""

    make: Callable[[Random], Case]
    parse: Callable[[Case], Coroutine[None, None, str | None]]


Targets = Mapping[str, Target]


class FuzzFailure(Exception):
    """One input failed."""

    def __init__(self, message: str, case: Case) -> None:
        super().__init__(message)
        self.case = case


@dataclass
class Tally:
    """How the inputs of one target ended, by the name of the error; "taken" for none.

    Attributes:
        outcomes: digests of different ends: of errors whose messages differ in more than values.
    """

    ends: Counter[str] = field(default_factory=Counter)
    outcomes: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {end}" for end, count in self.ends.most_common())
        return f"{self.ends.total()} inputs, {len(self.outcomes)} outcomes: {ends}"

    def add(self, end: str, message: str) -> bool:
        """Returns whether nothing has ended this way before."""
        self.ends[end] += 1
        text = f"{end} {_VALUES.sub('_', message[: 2 * _OUTCOME_CHARS])[:_OUTCOME_CHARS]}"
        outcome = hashlib.blake2s(text.encode(errors="replace"), digest_size=4).hexdigest()
        is_new = outcome not in self.outcomes
        self.outcomes.add(outcome)
        return is_new


class Pool:
    """Inputs that ended in a new way. Changing them reaches further than drawing others."""

    def __init__(self) -> None:
        self._cases: list[Case] = []

    def changed(self, random: Random) -> Case | None:
        """One of them with one part changed; None most of the time."""
        if not self._cases or random.random() > 0.3:
            return None
        parts = list(random.choice(self._cases))
        if not parts:
            return None
        place = random.randrange(len(parts))
        parts[place] = mutate.any_data(random, parts[place])
        return tuple(parts)

    def add(self, random: Random, case: Case) -> None:
        if sum(map(len, case)) > _POOL_BYTES_MAX:
            return
        if len(self._cases) < _POOL_MAX:
            self._cases.append(case)
        else:
            self._cases[random.randrange(_POOL_MAX)] = case


def run_seed(
    name: str,
    target: Target,
    seed: int,
    tally: Tally,
    pool: Pool | None = None,
    note: Callable[[Case], None] = lambda case: None,
) -> None:
    """Draws the seed's input, or changes one of the pool's, and runs it.

    Raises:
        FuzzFailure: as `run_case`.
    """
    random = Random(f"{name}/{seed}")
    case = (pool.changed(random) if pool else None) or target.make(random)
    note(case)
    try:
        is_new = run_case(target, case, tally)
    except FuzzFailure as failure:
        raise FuzzFailure(f"{name}, seed {seed}: {failure}", case) from failure.__cause__
    if is_new and pool is not None:
        pool.add(random, case)


def run_case(target: Target, case: Case, tally: Tally) -> bool:
    """Returns whether the input ended in a new way.

    Raises:
        FuzzFailure: the parser let an error of another kind through, found a bug in itself, or took too long.
    """
    began = time.process_time()
    try:
        with _stopped_after(CPU_S_MAX):
            end, _, message = (target.parse(case) or "taken").partition(" ")
    except InternalError as error:
        raise FuzzFailure(f"{type(error).__name__}: {error}"[:2000], case) from error
    except BatonError as error:
        if len(str(error)) > ERROR_CHARS_MAX:
            raise FuzzFailure(f"an error of {len(str(error))} characters", case) from error
        end, message = type(error).__name__, str(error)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise FuzzFailure(f"{type(error).__name__}: {error}"[:2000], case) from error
    if (took_s := time.process_time() - began) > CPU_S_MAX:
        raise FuzzFailure(f"took {took_s:.1f} s", case)
    return tally.add(end, message)


def save_case(folder: Path, name: str, case: Case) -> Path:
    """Writes the input as a file, so that it can be replayed after the generator has changed."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"target": name, "parts": [part.decode("latin-1") for part in case]}, indent=1) + "\n"
    path = folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"
    path.write_text(text)
    return path


def read_case(path: Path) -> tuple[str, Case]:
    """A target's name, and an input of it."""
    found = json.loads(path.read_text())
    return found["target"], tuple(part.encode("latin-1") for part in found["parts"])


class _TooLong(BaseException):
    """Not an Exception, which a parser might catch."""


@contextmanager
def _stopped_after(seconds: float) -> Iterator[None]:
    """Raises _TooLong in the main thread after so much CPU time."""

    def stop(number: int, frame: object) -> None:
        del number, frame
        raise _TooLong(f"took {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
