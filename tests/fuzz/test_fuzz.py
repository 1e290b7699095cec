"""A few seconds of `make fuzz`."""

from collections.abc import Iterator, Mapping

import pytest

from tests.fuzz.all import all_targets
from tests.fuzz.target import Parse, Tally, run_seed

NAMES = (
    *("converted", "error_details", "hello", "trailer", "config", "safetensors", "index", "tokenizer"),
    *("chat_template", "settings", "addresses", "gateway_grpc", "gateway_http", "node_grpc"),
)
INPUTS = 100


@pytest.fixture(scope="module")
def targets() -> Iterator[Mapping[str, Parse]]:
    with all_targets() as found:
        assert set(found) == set(NAMES)
        yield found


@pytest.mark.parametrize("name", NAMES)
def test_every_input_is_taken_or_refused_with_an_error_of_ours(targets: Mapping[str, Parse], name: str) -> None:
    tally = Tally()
    for seed in range(INPUTS):
        run_seed(name, targets[name], seed, tally)
    assert tally.ends.total() == INPUTS
