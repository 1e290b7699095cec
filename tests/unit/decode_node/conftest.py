"""Handshakes of pairs may take long here: a busy machine does not end them."""

import pytest

from decode_node import prefill_peer, prefill_peers
from tests.unit.decode_node.streams import DEADLINE_S


@pytest.fixture(autouse=True)
def _patient_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_peer, "_HELLO_TIMEOUT_S", DEADLINE_S)
    monkeypatch.setattr(prefill_peer, "_WARM_UP_TIMEOUT_S", DEADLINE_S)
    monkeypatch.setattr(prefill_peers, "_OLDER_END_S", DEADLINE_S)
