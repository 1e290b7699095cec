"""A minute of `make fuzz`: the first seeds, and inputs that once failed. How many seeds does not depend on how fast the
machine is: a fast one would find what no other has seen."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.all import NAMES, all_targets
from tests.fuzz.target import CORPUS, FuzzFailure, Tally, Targets, read_case, run_case, run_seed, save_case

# About a second of CPU time each. A failure names its seed: make fuzz TARGET=name FIRST=seed COUNT=1.
INPUTS = 2_000
FEWER_INPUTS = {
    "families": 30,
    "gguf_file": 30,
    "quantization": 300,
    "tokenizer_forms": 600,
    "chat_template": 400,
    "gateway_grpc": 500,
    "gateway_http": 800,
    "node_grpc": 400,
}


@pytest.fixture(scope="module")
def targets() -> Iterator[Targets]:
    with all_targets() as found:
        yield found


@pytest.mark.parametrize("name", NAMES)
def test_every_input_is_taken_or_refused_with_an_error_of_ours(targets: Targets, name: str) -> None:
    tally = Tally()
    inputs = FEWER_INPUTS.get(name, INPUTS)
    for seed in range(inputs):
        try:
            run_seed(name, targets[name], seed, tally)
        except FuzzFailure as failure:
            path = save_case(CORPUS, name, failure.case)
            pytest.fail(f"{failure}\nsaved as {path}:\n{path.read_text()[:20_000]}")
    assert tally.ends.total() == inputs


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.json")), ids=lambda path: path.stem)
def test_an_input_that_once_failed_does_not_any_more(targets: Targets, path: Path) -> None:
    name, case = read_case(path)
    run_case(targets[name], case, Tally())


def test_a_saved_input_is_read_as_it_was(tmp_path: Path) -> None:
    case = bytes(range(256)), b"", "ü".encode()
    assert read_case(save_case(tmp_path, "keys", case)) == ("keys", case)
