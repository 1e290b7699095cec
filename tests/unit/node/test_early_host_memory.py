"""Host memory that is page-locked while a rank loads its model. The GPU is a name here, and nothing is locked."""

import threading
from pathlib import Path

import pytest
import torch

from baton.core.errors import ConfigError
from baton.node.early_host_memory import EarlyHostMemory
from baton.settings.node_config import DecodeSettings
from kvtransfer.movers.host_pages import HostPages

SETTINGS = DecodeSettings(model=Path("m"), host_cache_gib=2**-20)


def refuse(num_bytes: int, _device: torch.device) -> HostPages:
    raise ConfigError(f"{num_bytes} bytes are too many", field="host_cache_gib", cure="")


def test_it_is_locked_while_something_else_happens() -> None:
    loaded = threading.Event()

    def lock_later(num_bytes: int, _device: torch.device) -> HostPages:
        assert loaded.wait(60)
        return HostPages(num_bytes, pinned=False)

    early = EarlyHostMemory(SETTINGS, "cuda:0", lock=lock_later)
    assert early.pages is None
    loaded.set()
    early.wait()
    assert early.pages is not None
    assert early.pages.tensor.numel() == 1024


def test_a_size_that_cannot_be_had_is_an_error() -> None:
    early = EarlyHostMemory(SETTINGS, "cuda:0", lock=refuse)
    with pytest.raises(ConfigError, match="1024 bytes are too many"):
        early.wait()


def test_there_is_none_for_a_cpu() -> None:
    early = EarlyHostMemory(SETTINGS, "cpu", lock=refuse)
    early.wait()
    assert early.pages is None
