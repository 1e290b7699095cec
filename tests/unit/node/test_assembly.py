"""The engine's limits that follow from a node's settings."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.core.errors import ConfigError
from baton.engine.build import StepLimits
from baton.node.from_settings import engine_limits
from baton.node.starting import default_name
from baton.protos.v1 import node_status_pb2
from baton.settings.node_config import DecodeSettings


def settings(**values: object) -> DecodeSettings:
    return DecodeSettings.model_validate(values)


def built(max_batch_tokens: int, *, rows_in_order: bool = False) -> Any:
    cache = SimpleNamespace(view=SimpleNamespace(device=torch.device("cuda", 0)))
    limits = StepLimits(max_batch_tokens, 256)
    return SimpleNamespace(limits=limits, costs=None, cache=cache, rows_in_order=rows_in_order)


def test_a_batch_invariant_node_starts_with_any_step_size_of_its_profile() -> None:
    limits = engine_limits(settings(batch_invariant=True), built(512), max_context_tokens=4096)
    assert limits.chunk_align_tokens == 512
    assert limits.max_batch_tokens == 512 + 255
    larger = engine_limits(settings(batch_invariant=True), built(2048), max_context_tokens=4096)
    assert larger.max_batch_tokens == 2048


def test_a_batch_invariant_node_whose_rows_are_in_order_cuts_prompts_anywhere() -> None:
    built_in_order = built(512, rows_in_order=True)
    limits = engine_limits(settings(batch_invariant=True), built_in_order, max_context_tokens=4096)
    assert (limits.chunk_align_tokens, limits.max_batch_tokens) == (None, 512)


def test_a_batch_invariant_node_has_as_many_seats_as_its_given_step_size_allows() -> None:
    limits = engine_limits(settings(batch_invariant=True, max_batch_tokens=600), built(600), max_context_tokens=4096)
    assert (limits.max_batch_tokens, limits.max_batch_requests) == (600, 89)
    smallest = engine_limits(settings(batch_invariant=True, max_batch_tokens=512), built(512), max_context_tokens=4096)
    assert smallest.max_batch_requests == 1


def test_sizes_that_the_operator_gave_are_not_changed() -> None:
    given = settings(batch_invariant=True, max_batch_tokens=512, max_batch_requests=256)
    with pytest.raises(ConfigError, match="max_batch_tokens is 512"):
        engine_limits(given, built(512), max_context_tokens=4096)
    with pytest.raises(ConfigError, match="no room for a chunk of 512"):
        engine_limits(settings(batch_invariant=True, max_batch_tokens=511), built(511), max_context_tokens=4096)
    assert engine_limits(settings(), built(512), max_context_tokens=4096).max_batch_tokens == 512


def test_a_node_without_a_name_gets_one_that_stays_and_shows_no_address() -> None:
    """Clients see it in receipts."""
    names = {default_name(node_status_pb2.ROLE_DECODE, address) for address in ("10.0.0.7:7102", "10.0.0.7:7103")}
    assert len(names) == 2
    assert all(re.fullmatch(r"decode-[0-9a-f]{6}", name) for name in names)
    assert default_name(node_status_pb2.ROLE_DECODE, "10.0.0.7:7102") in names
