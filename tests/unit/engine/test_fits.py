"""Sizes that a machine cannot hold are refused from its figures alone."""

from dataclasses import replace

import pytest
import torch

from baton.core.errors import ConfigError
from baton.engine.device import fits
from baton.engine.device.fits import check_fits, memory_of
from baton.kvcache.spec import KVCacheSpec, KVKind
from baton.settings.config import MIB
from baton.settings.node_config import DecodeSettings
from baton.settings.reader import read_settings

SPEC = KVCacheSpec(KVKind.GQA, num_layers=4, num_kv_heads=2, head_dim=64, dtype="bfloat16")
CPU = torch.device("cpu")


def settings(*flags: str) -> DecodeSettings:
    return read_settings(DecodeSettings, "decode_node", list(flags))


def test_a_cache_that_fits_is_accepted_up_to_the_last_block() -> None:
    given = settings()
    block_bytes = given.block_size * SPEC.bytes_per_token
    most = (memory_of(CPU) - given.staging_bytes(on_gpu=False)) // block_bytes
    check_fits(given, SPEC, num_blocks=most, device=CPU)
    room = (memory_of(CPU) - given.staging_bytes(on_gpu=False)) // MIB
    with pytest.raises(ConfigError, match=rf"a KV cache of {most + 1} blocks, .* allowed: up to {room}"):
        check_fits(given, SPEC, num_blocks=most + 1, device=CPU)


def test_states_take_their_share_of_the_memory() -> None:
    given = settings()
    state = KVCacheSpec(KVKind.STATE, num_layers=3, num_kv_heads=8, head_dim=1 << 14, dtype="float32")
    spec = replace(SPEC, state=state)
    room = memory_of(CPU) - given.staging_bytes(on_gpu=False) - 7 * spec.bytes_per_slot
    most = room // (given.block_size * spec.bytes_per_token)
    check_fits(given, spec, num_blocks=most, device=CPU, state_slots=7)
    with pytest.raises(ConfigError, match=rf"a KV cache of {most + 1} blocks"):
        check_fits(given, spec, num_blocks=most + 1, device=CPU, state_slots=7)


def test_staging_buffers_that_never_fit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "memory_of", lambda device: 4096 * MIB)
    with pytest.raises(ConfigError, match="segment_mib needs 8,192 MiB of staging buffers"):
        check_fits(settings("--segment-mib", "1024"), SPEC, num_blocks=None, device=CPU)
