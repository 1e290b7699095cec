"""Clients that Baton did not write, in an environment of their own: BATON_CLIENTS_VENV, else `.venv-clients`."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def clients_venv() -> Path:
    """The environment with the clients; its programs are in `bin`."""
    venv = Path(os.environ.get("BATON_CLIENTS_VENV", ROOT / ".venv-clients"))
    assert (venv / "bin" / "python").exists(), f"{venv} is no environment: run `make test-clients`, which makes it"
    return venv
