"""The host memory for KV that a node takes where no setting says how much."""

from pathlib import Path
from typing import Any

import pytest

from baton.core.memory import free_memory_bytes
from baton.engine.build import build_runner
from baton.node import host_cache
from baton.node.from_settings import transfer_settings
from baton.node.host_cache import host_cache_of_rank, with_host_cache
from baton.settings.config import DEMO_MODELS
from baton.settings.node_config import GIB, DecodeSettings


@pytest.mark.parametrize(
    ("free_gib", "gpus", "ranks", "gib"),
    [
        (2000, 8, 1, 62.5),
        (4000, 8, 8, 64),
        (64, 1, 1, 16),
        (64, 1, 2, 8),
        (1000, 0, 1, 1),
        (1000, 0, 4, 0.25),
        (4, 0, 1, 0.25),
        (0, 0, 1, 0),
        (0, 8, 1, 0),
    ],
    ids=str,
)
def test_each_rank_takes_its_share_of_what_is_free(free_gib: float, gpus: int, ranks: int, gib: float) -> None:
    assert host_cache_of_rank(int(free_gib * GIB), gpus=gpus, ranks=ranks) == int(gib * GIB)


def test_the_nodes_of_all_gpus_take_a_quarter_together_though_they_start_at_once() -> None:
    assert 8 * host_cache_of_rank(80 * GIB, gpus=8, ranks=1) == 20 * GIB


def test_a_node_on_a_cpu_takes_a_little() -> None:
    settings = with_host_cache(DecodeSettings(model=Path("model"), device="cpu"))
    assert 0 < settings.host_cache_bytes <= min(GIB, free_memory_bytes() // 8)


def test_a_node_on_a_gpu_counts_the_gpus_that_a_variable_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cache, "free_memory_bytes", lambda: 80 * GIB)
    monkeypatch.setattr(host_cache, "installed_gpus", lambda: 4)
    monkeypatch.setattr(host_cache, "visible_gpus", lambda: 1)
    for device in ("cuda", "cuda:3", "auto"):
        assert with_host_cache(DecodeSettings(model=Path("model"), device=device)).host_cache_bytes == 5 * GIB


@pytest.mark.parametrize("given", [{"host_cache_gib": 0}, {"host_cache_gib": 2}, {"prefix_cache": False}], ids=str)
def test_what_the_settings_say_counts(given: dict[str, Any]) -> None:
    settings = DecodeSettings(model=Path("model"), device="cpu", **given)
    assert with_host_cache(settings) == settings
    assert settings.host_cache_bytes == given.get("host_cache_gib", 0) * GIB


def test_a_size_that_nobody_asked_for_and_that_holds_no_entry_is_none() -> None:
    given = DecodeSettings(model=DEMO_MODELS / "llama", device="cpu", num_blocks=8)
    built = build_runner(given)

    def taken(**values: Any) -> int:
        return transfer_settings(given.model_copy(update=values), built, 1).host_cache_bytes

    assert taken(free_host_cache_bytes=1 << 30) == 1 << 30
    assert taken(free_host_cache_bytes=1 << 12) == 0
    assert taken(free_host_cache_bytes=1 << 12, file_cache_dir=Path("kv")) == 1 << 12, "refused later, with its cure"
    assert taken(host_cache_gib=(1 << 12) / GIB) == 1 << 12, "refused later, with its cure"
