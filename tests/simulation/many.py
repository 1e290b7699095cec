"""Many runs in one process, with one garbage collection for each batch."""

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tests.simulation.cluster import Outcome, run_seed

_BATCH = 50


@contextmanager
def _collecting_by_hand() -> Iterator[None]:
    """Pauses the garbage collector. Each run leaves one large cycle, but the collector would scan all objects again and
    again, also those of imported packages: a third of the time of all runs."""
    others_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if not others_frozen:
            gc.unfreeze()


def run_seeds(seeds: Iterable[int]) -> Iterator[Outcome]:
    """Outcomes in the order of the seeds.

    Raises:
        SeedFailed: for the first seed that fails.
    """
    with _collecting_by_hand():
        for number, seed in enumerate(seeds):
            if number % _BATCH == 0:
                gc.collect()
            yield run_seed(seed)
