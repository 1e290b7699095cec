"""A minute of `make fuzz`: the first seeds, and inputs that once failed."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.all import NAMES, all_targets
from tests.fuzz.target import CORPUS, FuzzFailure, Tally, Targets, read_case, run_case, run_seed, save_case

INPUTS_MIN = 30
CPU_S = 1.2  # of each target
SEEDS_MAX = 1_000_000  # a failure names its seed: make fuzz TARGET=name FIRST=seed COUNT=1


@pytest.fixture(scope="module")
def targets() -> Iterator[Targets]:
    with all_targets() as found:
        yield found


@pytest.mark.parametrize("name", NAMES)
def test_every_input_is_taken_or_refused_with_an_error_of_ours(targets: Targets, name: str) -> None:
    tally = Tally()
    ends_s = time.process_time() + CPU_S
    for seed in range(SEEDS_MAX):
        if seed >= INPUTS_MIN and time.process_time() > ends_s:
            break
        try:
            run_seed(name, targets[name], seed, tally)
        except FuzzFailure as failure:
            path = save_case(CORPUS, name, failure.case)
            pytest.fail(f"{failure}\nsaved as {path}:\n{path.read_text()[:20_000]}")
    assert tally.ends.total() >= INPUTS_MIN


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.json")), ids=lambda path: path.stem)
def test_an_input_that_once_failed_does_not_any_more(targets: Targets, path: Path) -> None:
    name, case = read_case(path)
    run_case(targets[name], case, Tally())


def test_a_saved_input_is_read_as_it_was(tmp_path: Path) -> None:
    case = bytes(range(256)), b"", "ü".encode()
    assert read_case(save_case(tmp_path, "keys", case)) == ("keys", case)
