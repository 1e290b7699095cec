"""What a node says of settings of stores that cannot work, before it loads a model."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ConfigError
from baton.node import kv_stores
from baton.node.kv_stores import check_stores
from baton.settings.node_config import DecodeSettings


def settings(**given: Any) -> DecodeSettings:
    return DecodeSettings(model=Path("model"), **given)


def failing(number: int) -> Callable[..., None]:
    def fail(*_args: object, **_named: object) -> None:
        raise OSError(number, "it failed")

    return fail


def test_a_directory_is_made_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    check_stores(settings(host_cache_gib=1, kv_store=f"file://{tmp_path}/new/kv"))
    assert list((tmp_path / "new" / "kv").iterdir()) == []


def test_without_stores_there_is_nothing_to_check() -> None:
    check_stores(settings())
    check_stores(settings(host_cache_gib=1))


@pytest.mark.parametrize("below", ["kv", "kv/deeper"])
def test_a_file_in_the_directorys_place_is_an_error_with_a_cure(tmp_path: Path, below: str) -> None:
    (tmp_path / "kv").write_text("not ours")
    with pytest.raises(ConfigError, match=f"kv_store has {tmp_path / below}, ") as raised:
        check_stores(settings(host_cache_gib=1, kv_store=f"file://{tmp_path / below}"))
    assert raised.value.field == "kv_store"
    assert "may write to" in raised.value.cure
    assert (tmp_path / "kv").read_text() == "not ours"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_directory_that_the_user_may_not_write_to_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(kv_stores, "TemporaryFile", failing(number))
    with pytest.raises(ConfigError, match="it failed"):
        check_stores(settings(host_cache_gib=1, kv_store=f"file://{tmp_path}"))


def test_a_full_disk_is_none_because_the_store_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_stores, "TemporaryFile", failing(errno.ENOSPC))
    check_stores(settings(host_cache_gib=1, kv_store=f"file://{tmp_path}"))


@pytest.mark.parametrize("given", [{"kv_store": "file:///kv"}, {"kv_store": "mooncake://host"}])
def test_stores_need_host_memory(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="there is no host memory for KV") as raised:
        check_stores(settings(**given))
    assert raised.value.cure == "give --host-cache-gib above 0"


def test_an_address_that_names_no_store_is_an_error() -> None:
    with pytest.raises(ConfigError, match="'foo' names no Mooncake Store"):
        check_stores(settings(host_cache_gib=1, kv_store="foo"))


@pytest.mark.parametrize("given", ["/kv", "file://kv", "file:///kv,file:///more", "mooncake://host,mooncake://more"])
def test_a_path_without_its_scheme_and_two_stores_of_a_kind_are_errors_with_what_is_allowed(given: str) -> None:
    with pytest.raises(ConfigError, match=r"kv_store has .*; allowed: file:///path, mooncake://HOST:PORT") as raised:
        check_stores(settings(host_cache_gib=1, kv_store=given))
    assert raised.value.field == "kv_store"
