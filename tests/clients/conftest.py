"""One cluster for all clients, started as a user starts it."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.install import CLIENTS
from tests.integration.up import Up, interrupt, start_up


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--schemathesis-examples", default="60", help="requests for each operation of the OpenAPI page")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Up]:
    up = start_up("--port", "0")
    yield up
    assert interrupt(up) == 0


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """The environment of a client's process: other people's programs first on PATH."""
    places = [*(str(CLIENTS / name / "bin") for name in ("python", "smg", "aiperf")), str(Path(sys.executable).parent)]
    return {**os.environ, "PATH": os.pathsep.join([*places, os.environ["PATH"]]), "OTEL_SDK_DISABLED": "true"}
