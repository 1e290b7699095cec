"""The reference of the demo Llama."""

import pytest

from tests.integration.cluster import LLAMA
from tests.integration.reference import Reference


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference(LLAMA)
