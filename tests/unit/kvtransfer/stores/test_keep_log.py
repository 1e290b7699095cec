"""Keep times of files outlive the process; a log of them that is damaged costs keep times, never an entry."""

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from baton.core.kv_entries import KEEP_S_MAX, EntryKey, KeepTime
from kvtransfer.stores.file_format import HEADER_BYTES, EntryFileName
from kvtransfer.stores.files import FileStore
from kvtransfer.stores.keep_log import KEEP_TIMES, RECORD_BYTES, KeepLog, KeepRecord
from tests.unit.kvtransfer.stores.entries import entry_keys, entry_of, root_of

ENTRY_BYTES = 4096
FILE_BYTES = HEADER_BYTES + ENTRY_BYTES
CAPACITY = 16
US, THEM = 1, 2
SPEC = b"spec"
KEYS = entry_keys(4)
NOW_S = 2e9
RECORD = KeepRecord(NOW_S, 300.0, US, KEYS[-1].block.digest)


@contextmanager
def opened(folder: Path, *, capacity: int = CAPACITY, namespace: bytes = SPEC) -> Iterator[FileStore]:
    store = FileStore(folder, namespace=namespace, entry_bytes=ENTRY_BYTES, max_bytes=capacity * FILE_BYTES)
    try:
        yield store
    finally:
        store.close()


def put(store: FileStore, *keys: EntryKey) -> list[bool]:
    return [store.put(key, memoryview(entry_of(key, ENTRY_BYTES))) for key in keys]


def flood(store: FileStore, entries: int = 2 * CAPACITY) -> None:
    """As many entries of others, each used once."""
    for number in range(entries):
        assert put(store, *entry_keys(1, salt="flood", first_token=number)) == [True]


def folder_of(directory: Path) -> Path:
    return directory / f"v1-{SPEC.hex()}"


def log_of(directory: Path) -> KeepLog:
    return KeepLog(str(folder_of(directory)))


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A directory that a node has left, with entries that one client keeps and others that nobody does."""
    with opened(tmp_path) as store:
        put(store, *KEYS, *entry_keys(4, salt="other"))
        store.keep(KEYS, KeepTime(300.0, US))
    return tmp_path


def test_entries_are_kept_after_a_restart(kept: Path) -> None:
    with opened(kept) as store:
        flood(store)
        assert store.has(KEYS) == 4
        assert store.has(entry_keys(4, salt="other")) == 0


def test_without_the_log_nothing_is_kept(kept: Path) -> None:
    (folder_of(kept) / KEEP_TIMES).unlink()
    with opened(kept) as store:
        assert store.has(KEYS) == 4
        flood(store)
        assert store.has(KEYS) == 0


def test_a_time_that_is_over_counts_no_more(kept: Path) -> None:
    log_of(kept).append(replace(RECORD, written_s=time.time() - 301.0))
    with opened(kept) as store:
        flood(store)
        assert store.has(KEYS) == 0


def test_a_session_that_is_over_stays_over(tmp_path: Path) -> None:
    """Its last record counts, also for the turns before."""
    with opened(tmp_path) as store:
        put(store, *KEYS, *entry_keys(4, salt="other"))
        store.keep(KEYS[:3], KeepTime(300.0, US))
        store.keep(KEYS, KeepTime(300.0, US))
        store.keep(KEYS, KeepTime(0.0, US))
    with opened(tmp_path, capacity=8) as store:
        flood(store, 4)
        assert store.has(KEYS) == 0
        assert store.has(entry_keys(4, salt="other")) == 4


def test_another_client_that_keeps_the_same_entries_is_remembered_too(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, *KEYS)
        store.keep(KEYS, KeepTime(300.0, THEM))
        store.keep(KEYS, KeepTime(0.0, US))
    with opened(tmp_path) as store:
        flood(store)
        assert store.has(KEYS) == 4


def test_a_clients_share_holds_after_a_restart(tmp_path: Path) -> None:
    sequences = [entry_keys(4, salt=f"ours {number}") for number in range(3)]
    with opened(tmp_path) as store:
        for keys in sequences:
            put(store, *keys)
    for keys in sequences:
        log_of(tmp_path).append(KeepRecord(time.time(), 300.0, US, keys[-1].block.digest))
    with opened(tmp_path) as store:
        flood(store)
        assert [store.has(keys) for keys in sequences] == [0, 0, 4], "the newest is kept"


def test_files_that_are_found_late_are_kept_too(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory may have more files than a node looks at before it starts."""
    monkeypatch.setattr("kvtransfer.stores.files._OPEN_S", -1.0)
    with opened(kept) as store:
        monkeypatch.setattr("kvtransfer.stores.files._OPEN_S", 60.0)
        flood(store)
        assert store.has(KEYS) == 4


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"KEEP",
        b"KEEP" * 1000,
        RECORD.encode()[:-1],
        RECORD.encode()[1:],
        RECORD.encode()[:20] + b"x" + RECORD.encode()[21:],
        replace(RECORD, seconds=2 * KEEP_S_MAX).encode(),
        replace(RECORD, seconds=-1.0).encode(),
        replace(RECORD, seconds=float("nan")).encode(),
        replace(RECORD, written_s=float("inf")).encode(),
    ],
)
def test_damaged_records_are_left_out_and_those_after_them_count(tmp_path: Path, damaged: bytes) -> None:
    later = replace(RECORD, digest=b"d" * 16)
    (tmp_path / KEEP_TIMES).write_bytes(damaged + later.encode())
    assert KeepLog(str(tmp_path)).records(NOW_S) == [later]


@pytest.mark.parametrize("replacement", ["a folder", "a pipe", "a link"])
def test_what_somebody_puts_in_its_place_costs_keep_times_only(kept: Path, replacement: str) -> None:
    path = folder_of(kept) / KEEP_TIMES
    content = path.read_bytes()
    path.unlink()
    if replacement == "a folder":
        path.mkdir()
    elif replacement == "a pipe":
        os.mkfifo(path)
    else:
        (kept / "elsewhere").write_bytes(content)
        path.symlink_to(kept / "elsewhere")
    with opened(kept) as store:
        store.keep(KEYS, KeepTime(300.0, US))
        assert store.counters().failed == 1
        flood(store)
        assert store.has(KEYS) == 4, "as long as this process runs"
    if replacement == "a link":
        assert (kept / "elsewhere").read_bytes() == content


def test_names_that_form_a_circle_keep_nothing(kept: Path) -> None:
    one, other = (b"1" * 16, b"2" * 16)
    for digest, parent in ((one, other), (other, one)):
        name = EntryFileName(digest, parent, root_of(), 1)
        (folder_of(kept) / str(name)).write_bytes(bytes(FILE_BYTES))
    log_of(kept).append(KeepRecord(time.time(), 300.0, US, one))
    with opened(kept) as store:
        assert store.has(KEYS) == 4


def test_a_disk_that_is_full_costs_keep_times_only(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "no space")

    with opened(kept) as store:
        monkeypatch.setattr(os, "write", refuse)
        store.keep(KEYS, KeepTime(300.0, US))
        assert store.counters().failed == 1
        assert store.has(KEYS) == 4


def test_the_log_stays_short_and_has_the_latest_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.stores.keep_log._LOG_BYTES_MAX", 16 * RECORD_BYTES)
    log, path = KeepLog(str(tmp_path)), tmp_path / KEEP_TIMES
    records = [replace(RECORD, written_s=NOW_S + number, digest=b"%16d" % number) for number in range(100)]
    for record in records:
        log.append(record)
        assert path.stat().st_size <= 16 * RECORD_BYTES
    assert log.records(NOW_S + 100)[-8:] == records[-8:]
    assert [each.name for each in tmp_path.iterdir()] == [KEEP_TIMES]


def test_records_of_one_conversation_do_not_add_up(tmp_path: Path) -> None:
    log = KeepLog(str(tmp_path))
    for number in range(10):
        log.append(replace(RECORD, written_s=NOW_S + number))
    assert log.records(NOW_S + 10) == [replace(RECORD, written_s=NOW_S + 9)]


def test_a_clock_that_was_set_back_keeps_nothing_longer_than_asked_for() -> None:
    assert RECORD.left_s(NOW_S - 1e6) == 300.0
    assert RECORD.left_s(NOW_S + 100.0) == 200.0
    assert RECORD.left_s(NOW_S + 300.0) == 0.0


def test_the_folder_of_an_older_model_goes_with_its_last_entry(kept: Path) -> None:
    """The log does not keep it."""
    with opened(kept, namespace=b"newer") as store:
        flood(store)
    with opened(kept, namespace=b"newer") as store:
        flood(store, 1)
    assert not folder_of(kept).exists()
    assert (kept / f"v1-{b'newer'.hex()}").exists()
