"""`python -m tests.fuzz.worker NAME FIRST STOP STEP SECONDS SHARED OUT`: one process of `python -m tests.fuzz`."""

import json
import sys
import time
import traceback
from pathlib import Path

from tests.fuzz.all import one_target
from tests.fuzz.state import Shared
from tests.fuzz.target import CORPUS, GROWTH_BYTES_MAX, FuzzFailure, Pool, Tally, peak_bytes, run_seed, save_case

_FAILURES_MAX = 20
_WARM_INPUTS = 1000  # after them, memory counts


def main(name: str, seeds: range, most_s: float, shared: Shared, out: Path) -> None:
    tally, pool = Tally(), Pool()
    findings: dict[str, str] = {}
    before = grown = 0
    ends_s = time.monotonic() + most_s
    with one_target(name) as target:
        for number, seed in enumerate(seeds):
            if time.monotonic() > ends_s or len(findings) >= _FAILURES_MAX:
                break
            try:
                run_seed(name, target, seed, tally, pool, lambda case, seed=seed: shared.set(seed, case))  # type: ignore[misc]
            except FuzzFailure as failure:
                _report(name, failure, findings)
            if number == _WARM_INPUTS:
                before = peak_bytes()
        grown = max(0, peak_bytes() - before) if before else 0
    if grown > GROWTH_BYTES_MAX:
        findings["memory"] = f"{grown >> 20} MiB more memory"
        print(f"FAILED {name}: {findings['memory']}", flush=True)
    found = {
        "ends": tally.ends,
        "outcomes": sorted(tally.outcomes),
        "findings": list(findings.values()),
        "grown_mib": grown >> 20,
        "cpu_s": time.process_time(),
    }
    out.write_text(json.dumps(found))


def _report(name: str, failure: FuzzFailure, findings: dict[str, str]) -> None:
    """Saves and prints the first input of each kind of failure."""
    last = ""
    if failure.__cause__ is not None:
        frame = traceback.extract_tb(failure.__cause__.__traceback__)[-1]
        last = f"{type(failure.__cause__).__name__} at {Path(frame.filename).name}:{frame.lineno}"
    if last not in findings:
        findings[last] = str(failure)[:300]
        print(f"FAILED {failure} {last}; saved as {save_case(CORPUS, name, failure.case)}", flush=True)


if __name__ == "__main__":
    given = sys.argv[1:]
    main(
        given[0],
        range(int(given[1]), int(given[2]), int(given[3])),
        float(given[4]),
        Shared(Path(given[5])),
        Path(given[6]),
    )
