"""Fixtures for tests with real processes: machines to start, and one reference per checkpoint."""

from collections.abc import Iterator

import pytest

from tests.integration.cluster import LLAMA, Machines, machines
from tests.integration.reference import Reference, References


@pytest.fixture
def start() -> Iterator[Machines]:
    with machines() as started:
        yield started


@pytest.fixture(scope="session")
def references() -> References:
    return References()


@pytest.fixture(scope="session")
def reference(references: References) -> Reference:
    """The reference of the demo Llama."""
    return references[LLAMA]
