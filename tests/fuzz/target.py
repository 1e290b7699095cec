"""What is fuzzed, and the oracle: an input is taken, or refused with an error of ours; in bounded time and memory."""

import resource
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

from baton.errors import BatonError, InternalError

# Of one input, which takes a few milliseconds at most. CPU time, so a busy machine changes nothing.
CPU_S_MAX = 5.0
GROWTH_BYTES_MAX = 1 << 30  # of the whole run

Parse = Callable[[Random], None]


class FuzzFailure(Exception):
    """One input failed; names target and seed, which replay it."""


@dataclass
class Tally:
    """How the inputs of one target ended, by the name of the error; "taken" for none."""

    ends: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return f"{self.ends.total()}: " + ", ".join(f"{count} {end}" for end, count in self.ends.most_common())


def run_seed(name: str, parse: Parse, seed: int, tally: Tally) -> None:
    """Raises: FuzzFailure: the parser let an error of another kind through, found a bug in itself, or took too long."""
    began = time.process_time()
    try:
        with _stopped_after(CPU_S_MAX):
            parse(Random(f"{name}/{seed}"))
        end = "taken"
    except InternalError as error:
        raise FuzzFailure(f"{name}, seed {seed}: {type(error).__name__}: {error}") from error
    except BatonError as error:
        if len(str(error)) > 30_000:
            raise FuzzFailure(f"{name}, seed {seed}: an error of {len(str(error))} characters") from error
        end = type(error).__name__
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise FuzzFailure(f"{name}, seed {seed}: {type(error).__name__}: {error}"[:2000]) from error
    if (took_s := time.process_time() - began) > CPU_S_MAX:
        raise FuzzFailure(f"{name}, seed {seed}: took {took_s:.1f} s")
    tally.ends[end] += 1


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
