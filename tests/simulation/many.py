"""Many runs in one process, at the price of one collection for a batch of them."""

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tests.simulation.cluster import Outcome, run_seed

_BATCH = 50


@contextmanager
def _collecting_by_hand() -> Iterator[None]:
    """Each run leaves one large cycle behind. The collector would look at everything again and again meanwhile, at the
    packages that are imported too: that is a third of the time of all runs."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def run_seeds(seeds: Iterable[int]) -> Iterator[Outcome]:
    """Outcomes in the order of the seeds.

    Raises:
        SeedFailed: of the first seed that fails.
    """
    with _collecting_by_hand():
        for number, seed in enumerate(seeds):
            if number % _BATCH == 0:
                gc.collect()
            yield run_seed(seed)
