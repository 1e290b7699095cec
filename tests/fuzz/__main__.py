"""`python -m tests.fuzz`: feeds many random inputs to every parser, or replays one seed of one of them."""

import argparse
import os
import sys
import time
import traceback

from tests.fuzz.all import all_targets
from tests.fuzz.target import GROWTH_BYTES_MAX, FuzzFailure, Parse, Tally, peak_bytes, run_seed

_REPORTED_MAX = 5


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="inputs of each target (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--target", default="", help="only the targets whose names begin so")
    parser.add_argument("--seconds", type=float, default=1e9, help="most time for one target (default: no limit)")
    arguments = parser.parse_args()
    os.environ["GRPC_VERBOSITY"] = "NONE"  # it writes about addresses that are none
    failed = False
    with all_targets() as targets:
        for name, parse in targets.items():
            if name.startswith(arguments.target):
                failed |= not _fuzz(
                    name, parse, range(arguments.first, arguments.first + arguments.count), arguments.seconds
                )
    return 1 if failed else 0


def _fuzz(name: str, parse: Parse, seeds: range, most_s: float) -> bool:
    tally, failures, began_s, before = Tally(), 0, time.monotonic(), peak_bytes()
    for seed in seeds:
        if time.monotonic() - began_s > most_s:
            break
        try:
            run_seed(name, parse, seed, tally)
        except FuzzFailure as failure:
            failures += 1
            if failures <= _REPORTED_MAX:
                last = traceback.extract_tb(failure.__cause__.__traceback__)[-1] if failure.__cause__ else ""
                print(f"FAILED {failure} at {last}")
            if failures > 100:
                break
    grown = (peak_bytes() - before) >> 20
    took_s = time.monotonic() - began_s
    print(f"{name}: {tally}; {failures} failed; {took_s:.0f} s, {grown} MiB more memory", flush=True)
    return not failures and grown << 20 < GROWTH_BYTES_MAX


if __name__ == "__main__":
    sys.exit(main())
