"""`python -m tests.simulation`: replays one seed with its trace, or runs many."""

import argparse
import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import islice

from rich.progress import track

from tests.simulation.cluster import SeedFailed, run_seed
from tests.simulation.many import run_seeds

_CHUNK = 250
_REPORTED_MAX = 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="make simulate", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this seed and print every event")
    parser.add_argument("--seeds", type=int, default=10_000, help="number of seeds to run (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        return replay(arguments.seed)
    return run_many(arguments.first, arguments.seeds)


def replay(seed: int) -> int:
    try:
        outcome = run_seed(seed, traced=True)
    except SeedFailed as failure:
        print(*failure.trace, sep="\n")
        print(f"\nseed {seed}: {type(failure.cause).__name__}: {failure.cause}")
        return 1
    print(*outcome.trace, sep="\n")
    print(f"\nseed {seed}: {outcome.events} events in {outcome.seconds:.3f} s; requests: {', '.join(outcome.ends)}")
    return 0


def run_many(first: int, count: int) -> int:
    starts = range(first, first + count, _CHUNK)
    chunks = [range(start, min(start + _CHUNK, first + count)) for start in starts]
    ends: Counter[str] = Counter()
    failures: list[str] = []
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        # A bounded number of chunks waits, so that the progress bar shows what is done.
        for chunk_ends, chunk_failures in track(pool.map(_run_chunk, chunks), "seeds", total=len(chunks)):
            ends.update(chunk_ends)
            failures += chunk_failures
    print(f"{count} seeds from {first}: {len(failures)} failed; requests: {dict(ends.most_common())}")
    for failure in islice(failures, _REPORTED_MAX):
        print(failure)
    return 1 if failures else 0


def _run_chunk(seeds: range) -> tuple[Counter[str], list[str]]:
    ends: Counter[str] = Counter()
    failures: list[str] = []
    while seeds:
        try:
            for outcome in run_seeds(seeds):
                ends.update(outcome.ends)
            break
        except SeedFailed as failure:
            failures.append(f"make simulate SEED={failure.seed}   {type(failure.cause).__name__}: {failure.cause}")
            seeds = range(failure.seed + 1, seeds.stop)
    return ends, failures


if __name__ == "__main__":
    sys.exit(main())
