"""The engine's limits that follow from a node's settings."""

import re
from types import SimpleNamespace
from typing import Any

from baton.engine.build import StepLimits
from baton.node.from_settings import engine_limits
from baton.node.starting import default_name
from baton.protos.v1 import node_status_pb2
from baton.settings.node_config import DecodeSettings


def settings(**values: object) -> DecodeSettings:
    return DecodeSettings.model_validate(values)


def built(max_batch_tokens: int) -> Any:
    return SimpleNamespace(limits=StepLimits(max_batch_tokens, 256), costs=None)


def test_batch_invariant_mode_changes_no_limit() -> None:
    for mode in (False, True):
        limits = engine_limits(settings(batch_invariant=mode), built(512), max_context_tokens=4096)
        assert (limits.max_batch_tokens, limits.max_batch_requests, limits.seats) == (512, 256, 256)


def test_a_node_without_a_name_gets_one_that_stays_and_shows_no_address() -> None:
    """Clients see it in receipts."""
    names = {default_name(node_status_pb2.ROLE_DECODE, address) for address in ("10.0.0.7:7102", "10.0.0.7:7103")}
    assert len(names) == 2
    assert all(re.fullmatch(r"decode-[0-9a-f]{6}", name) for name in names)
    assert default_name(node_status_pb2.ROLE_DECODE, "10.0.0.7:7102") in names
