"""The content digest: every byte counts, equal copies are equal however stored, and a damaged or missing cache only
costs time."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.core.errors import ConfigError
from baton.models.checkpoint.checkpoint import read_checkpoint
from baton.models.loading.content_digest import content_digest
from baton.models.loading.digest_cache import DigestCache
from tests.damaged_weights import flip_bit
from tests.unit.models.tiny import save_tiny

NO_CACHE = DigestCache(None)


def digest(directory: Path, cache: DigestCache = NO_CACHE) -> str:
    with content_digest(read_checkpoint(directory), cache) as wait:
        return wait()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_tiny("llama", tmp_path / "model")
    return tmp_path / "model"


def test_a_bit_that_flips_anywhere_in_any_tensor_changes_it(model: Path) -> None:
    file, whole = model / "model.safetensors", digest(model)
    tensors = read_checkpoint(model).values()
    for tensor in tensors:
        for position in (tensor.start, (tensor.start + tensor.stop) // 2, tensor.stop - 1):
            flip_bit(file, position)
            assert digest(model) != whole, tensor.name
            flip_bit(file, position)
    assert digest(model) == whole


def test_a_large_tensor_counts_beyond_its_first_piece(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros((33 << 20) + 5, dtype=torch.uint8)}, file)
    whole = digest(tmp_path)
    start = read_checkpoint(tmp_path)["w"].start
    seen = {whole}
    for position in (start + (16 << 20) - 1, start + (16 << 20), start + (33 << 20) + 4):
        flip_bit(file, position)
        seen.add(digest(tmp_path))
        flip_bit(file, position)
    assert len(seen) == 4


@pytest.mark.parametrize("change", ["name", "dtype", "shape", "swap"])
def test_names_dtypes_shapes_and_places_count(model: Path, change: str) -> None:
    whole, file = digest(model), model / "model.safetensors"
    tensors = load_file(file)
    name, other = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight"
    match change:
        case "name":
            tensors["renamed"] = tensors.pop(name)
        case "dtype":
            tensors[name] = tensors[name].view(torch.int32)
        case "shape":
            tensors[name] = tensors[name].view(-1)
        case "swap":
            tensors[name], tensors[other] = tensors[other], tensors[name]
    save_file(tensors, file)
    assert digest(model) != whole


def test_sharding_does_not_count(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "one")
    save_tiny("llama", tmp_path / "many", max_shard_size="20KB")
    assert digest(tmp_path / "one") == digest(tmp_path / "many")


def test_a_file_that_ends_early_is_an_error_that_names_it(model: Path) -> None:
    stored = read_checkpoint(model)
    os.truncate(model / "model.safetensors", 4096)
    with pytest.raises(ConfigError, match=r"model\.safetensors: it ends"), content_digest(stored, NO_CACHE) as wait:
        wait()


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_changes_while_it_is_loaded_is_an_error(
    model: Path, tmp_path: Path, *, cached: bool, replaced: bool
) -> None:
    file = model / "model.safetensors"
    os.utime(file, (1e9, 1e9))
    cache = settled_cache(tmp_path) if cached else NO_CACHE
    whole = digest(model, cache)
    with content_digest(read_checkpoint(model), cache) as wait:
        assert wait() == whole
        if replaced:
            shutil.copyfile(file, tmp_path / "copy")
            os.replace(tmp_path / "copy", file)
        flip_bit(file, file.stat().st_size - 1)
        with pytest.raises(ConfigError, match="has changed while it was loaded"):
            wait()


def test_it_stops_with_the_body_that_it_runs_next_to(model: Path) -> None:
    with pytest.raises(ZeroDivisionError), content_digest(read_checkpoint(model), NO_CACHE):
        raise ZeroDivisionError


# ---- the cache


def settled_cache(tmp_path: Path) -> DigestCache:
    return DigestCache(tmp_path / "cache", settle_s=0)


def poisoned(tmp_path: Path, entry: Callable[[str], str]) -> None:
    """Rewrites the cache's entries."""
    (file,) = (tmp_path / "cache").iterdir()
    file.write_text("".join(entry(line) for line in file.read_text().splitlines(keepends=True)))


def test_a_file_that_was_hashed_before_is_not_read_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = digest(model, settled_cache(tmp_path))
    monkeypatch.delattr(os, "preadv")
    assert digest(model, settled_cache(tmp_path)) == whole


def test_a_file_that_has_changed_is_read_again_even_with_its_old_times(model: Path, tmp_path: Path) -> None:
    file = model / "model.safetensors"
    before = file.stat()
    whole = digest(model, settled_cache(tmp_path))
    flip_bit(file, before.st_size - 1)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    while file.stat().st_ctime_ns == before.st_ctime_ns:  # the clock of the file system may not have moved
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    damaged = digest(model, settled_cache(tmp_path))
    assert damaged != whole
    other = tmp_path / "other"
    other.write_bytes(file.read_bytes())
    flip_bit(other, before.st_size - 1)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(file)
    assert digest(model, settled_cache(tmp_path)) == whole


def test_a_file_that_has_just_changed_is_not_kept(model: Path, tmp_path: Path) -> None:
    digest(model, DigestCache(tmp_path / "cache", settle_s=3600))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: line[:70] + ("1" if line[70] == "0" else "0") + line[71:],  # of the value
        lambda line: line[:100],
        lambda line: "\0" * len(line),
        lambda line: "é" + line,
        lambda line: "",
    ],
)
def test_a_damaged_cache_costs_time_only(model: Path, tmp_path: Path, damage: Callable[[str], str]) -> None:
    whole = digest(model, settled_cache(tmp_path))
    poisoned(tmp_path, damage)
    assert digest(model, settled_cache(tmp_path)) == whole


def test_a_cache_that_cannot_be_read_or_written_costs_time_only(model: Path, tmp_path: Path) -> None:
    whole, cache = digest(model), tmp_path / "cache"
    cache.write_text("a file where the directory should be")
    assert digest(model, settled_cache(tmp_path)) == whole
    cache.unlink()
    os.mkfifo(tmp_path / "pipe")
    cache.mkdir()
    (cache / "weights-v1").symlink_to(tmp_path / "pipe")
    assert digest(model, settled_cache(tmp_path)) == whole
    assert (cache / "weights-v1").is_symlink()


def test_the_cache_keeps_the_newest_entries_and_no_other_file(tmp_path: Path) -> None:
    cache, file = DigestCache(tmp_path / "cache", settle_s=0, max_entries=2), tmp_path / "file"
    file.write_text("x")
    status = file.stat()
    keys = [DigestCache.key(file, status, str(number)) for number in range(3)]
    for number, key in enumerate(keys):
        cache.put(key, number, status, status)
    assert [cache.get(key) for key in keys] == [None, 1, 2]
    assert os.listdir(tmp_path / "cache") == ["weights-v1"]


def test_copies_of_a_file_have_entries_of_their_own(model: Path, tmp_path: Path) -> None:
    whole = digest(model, settled_cache(tmp_path))
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    flip_bit(copy / "model.safetensors", (copy / "model.safetensors").stat().st_size - 1)
    assert digest(copy, settled_cache(tmp_path)) != whole
