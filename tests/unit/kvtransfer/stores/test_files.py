"""The store in files: damage, bounds, other processes, and disks that fail."""

import errno
import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from baton.core.kv_entries import ENTRY_TOKENS, EntryKey
from kvtransfer.stores import leftovers
from kvtransfer.stores.file_format import HEADER_BYTES, EntryFileName, FileHeader
from kvtransfer.stores.files import FileStore
from tests.unit.kvtransfer.stores.entries import entry_keys, entry_of, root_of

ENTRY_BYTES = 2 * 4096
FILE_BYTES = HEADER_BYTES + ENTRY_BYTES
SPEC, OTHER = b"spec", b"other"
A_DAY_S = 24 * 3600.0
TIMEOUT_S = 60.0
KEYS = entry_keys(4)


@contextmanager
def opened(folder: Path, *, entries: int = 100, namespace: bytes = SPEC) -> Iterator[FileStore]:
    store = FileStore(folder, namespace=namespace, entry_bytes=ENTRY_BYTES, max_bytes=entries * FILE_BYTES + 1)
    try:
        yield store
    finally:
        store.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    with opened(tmp_path) as made:
        yield made


def contents(key: EntryKey) -> bytes:
    return entry_of(key, ENTRY_BYTES)


def put(store: FileStore, *keys: EntryKey) -> list[bool]:
    return [store.put(key, memoryview(contents(key))) for key in keys]


def got(store: FileStore, key: EntryKey) -> bytes | None:
    into = memoryview(bytearray(ENTRY_BYTES))
    return bytes(into) if store.get(key, into) else None


def path_of(folder: Path, key: EntryKey, namespace: bytes = SPEC) -> Path:
    return folder / f"v1-{namespace.hex()}" / str(EntryFileName.of(key))


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if not path.is_dir())


def test_a_file_is_its_header_and_the_entry_as_it_is(store: FileStore, tmp_path: Path) -> None:
    put(store, KEYS[0])
    header = FileHeader(SPEC, KEYS[0], ENTRY_BYTES).encode()
    assert path_of(tmp_path, KEYS[0]).read_bytes() == header + contents(KEYS[0])
    assert store.counters().bytes == FILE_BYTES == sum(path.stat().st_size for path in files(tmp_path))


def test_nobody_else_may_read_what_users_wrote(store: FileStore, tmp_path: Path) -> None:
    put(store, KEYS[0])
    (path,) = files(tmp_path)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_memory_on_pages_and_any_other_memory_get_the_same(store: FileStore) -> None:
    """The first is read and written around the page cache, where the filesystem can do it."""
    on_pages = memoryview(mmap.mmap(-1, 2 * ENTRY_BYTES))[:ENTRY_BYTES]
    elsewhere = memoryview(mmap.mmap(-1, 2 * ENTRY_BYTES))[7 : 7 + ENTRY_BYTES]
    for key, entry in zip(KEYS, (on_pages, elsewhere), strict=False):
        entry[:] = contents(key)
        assert store.put(key, entry)
    for into in (on_pages, elsewhere):
        for key in KEYS[:2]:
            assert store.get(key, into)
            assert bytes(into) == contents(key)


# ---- files that are not what they must be


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


RIGHT = FileHeader(SPEC, KEYS[0], ENTRY_BYTES)
BODY = contents(KEYS[0])
WRONG_TOKENS = KEYS[0]._replace(block=KEYS[0].block._replace(tokens=KEYS[1].block.tokens))
DAMAGED = {
    "empty": b"",
    "a header alone": RIGHT.encode(),
    "truncated": (RIGHT.encode() + BODY)[:-1],
    "longer": RIGHT.encode() + BODY + b"x",
    "zeros": bytes(FILE_BYTES),
    "foreign": (b"something else " * FILE_BYTES)[:FILE_BYTES],
    "a flipped bit in the header": flipped(RIGHT.encode(), 100) + BODY,
    "a flipped bit in the checksum": flipped(RIGHT.encode(), HEADER_BYTES - 1) + BODY,
    "another version": flipped(RIGHT.encode(), 8) + BODY,
    "another namespace": replace(RIGHT, namespace=OTHER).encode() + BODY,
    "another entry size": replace(RIGHT, entry_bytes=1).encode() + BODY,
    "another entry": replace(RIGHT, key=KEYS[1]).encode() + BODY,
    "other tokens": replace(RIGHT, key=WRONG_TOKENS).encode() + BODY,
    "another root": replace(RIGHT, key=KEYS[0]._replace(root=root_of("tenant"))).encode() + BODY,
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_a_miss_is_counted_and_is_removed(tmp_path: Path, name: str) -> None:
    with opened(tmp_path) as store:
        put(store, KEYS[0])
    path_of(tmp_path, KEYS[0]).write_bytes(DAMAGED[name])
    with opened(tmp_path) as store:
        assert got(store, KEYS[0]) is None
        counters = store.counters()
        assert (counters.damaged, counters.misses, counters.hits, counters.entries) == (1, 1, 0, 0)
        assert files(tmp_path) == []
        assert put(store, KEYS[0]) == [True]
        assert got(store, KEYS[0]) == contents(KEYS[0])


def test_a_file_of_another_size_is_not_there(store: FileStore, tmp_path: Path) -> None:
    put(store, KEYS[0])
    path_of(tmp_path, KEYS[0]).write_bytes(b"x")
    assert store.has(KEYS) == 0
    assert put(store, KEYS[0]) == [True]
    assert got(store, KEYS[0]) == contents(KEYS[0])


def test_the_entry_itself_is_its_readers_to_check(store: FileStore, tmp_path: Path) -> None:
    put(store, KEYS[0])
    changed = flipped(contents(KEYS[0]), 5)
    path_of(tmp_path, KEYS[0]).write_bytes(RIGHT.encode() + changed)
    assert got(store, KEYS[0]) == changed


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_something_else_in_a_files_place_is_a_miss(store: FileStore, tmp_path: Path, kind: str) -> None:
    """A pipe would be waited for without end, and a link could lead anywhere."""
    path = path_of(tmp_path, KEYS[0])
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        target = tmp_path / "target"
        target.write_bytes(RIGHT.encode() + BODY)
        path.symlink_to(target)
    else:
        path.mkdir()
    assert (store.has(KEYS), got(store, KEYS[0])) == (0, None)
    assert put(store, KEYS[0]) == [kind != "folder"]


def test_names_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / f"v1-{SPEC.hex()}"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / str(EntryFileName.of(KEYS[0]))).write_text("mine too")
    with opened(tmp_path, entries=2) as store:
        put(store, *entry_keys(2, first_token=1), *entry_keys(2, first_token=2))
        store.drop_roots(frozenset({root_of()}))
    assert [path.read_text() for path in files(tmp_path)] == ["mine too", "mine"]


# ---- the bound


def test_the_store_keeps_to_its_size(tmp_path: Path) -> None:
    with opened(tmp_path, entries=5) as store:
        for number in range(20):
            put(store, *entry_keys(1, first_token=number))
        counters = store.counters()
        assert (counters.entries, counters.written, counters.evicted) == (5, 20, 15)
        assert got(store, entry_keys(1, first_token=19)[0]) is not None
    assert len(files(tmp_path)) == 5


def test_a_file_that_has_left_is_not_found_again(tmp_path: Path) -> None:
    """The kernel reads the names of all these files at once, before the first of them leaves."""
    with opened(tmp_path, entries=40) as store:
        for number in range(120):
            assert put(store, *entry_keys(1, first_token=number * ENTRY_TOKENS)) == [True]
        assert store.counters().entries == len(files(tmp_path)) == 40


def test_a_sequence_longer_than_the_store_keeps_its_beginning(tmp_path: Path) -> None:
    keys = entry_keys(6)
    with opened(tmp_path, entries=4) as store:
        assert put(store, *keys) == [True, True, True, True, False, False]
        assert store.has(keys) == 4


def test_entries_that_are_read_stay_longer(tmp_path: Path) -> None:
    (used,), (idle,), (new,) = (entry_keys(1, first_token=number) for number in range(3))
    with opened(tmp_path, entries=2) as store:
        put(store, used, idle)
        got(store, used)
        put(store, new)
        assert [store.has([key]) for key in (used, idle, new)] == [1, 0, 1]


def test_after_a_restart_the_oldest_files_leave_first(tmp_path: Path) -> None:
    keys = [entry_keys(1, first_token=number)[0] for number in range(6)]
    with opened(tmp_path) as store:
        put(store, *keys[:5])
    for age, key in enumerate((keys[2], keys[0], keys[4], keys[1], keys[3])):
        os.utime(path_of(tmp_path, key), (0, time.time() - A_DAY_S + age))
    with opened(tmp_path, entries=5) as store:
        put(store, keys[5])
        assert [store.has([key]) for key in keys] == [1, 1, 0, 1, 1, 1]


def test_after_a_restart_the_keys_are_known_of_the_latest_files_and_of_all_before_each(tmp_path: Path) -> None:
    old, new = entry_keys(4), entry_keys(3, first_token=500)
    with opened(tmp_path) as store:
        put(store, *old)
        put(store, *new)
        assert store.found(100) == sorted((*old, *new), key=lambda key: (key.number, (*new, *old).index(key)))
    for key in old:
        os.utime(path_of(tmp_path, key), (0, time.time() - A_DAY_S))
    with opened(tmp_path) as store:
        assert store.found(6) == list(new)
        assert {*store.found(7)} == {*old, *new}
        assert all(store.knows(key.block.digest) for key in (*old, *new))
    with opened(tmp_path, namespace=OTHER) as store:
        assert store.found(100) == []


def test_a_file_that_is_not_what_its_name_says_has_no_key(tmp_path: Path) -> None:
    keys, (foreign,) = entry_keys(4), entry_keys(1, first_token=500)
    with opened(tmp_path) as store:
        put(store, *keys, foreign)
    path_of(tmp_path, foreign).rename(path_of(tmp_path, keys[0]))
    with path_of(tmp_path, keys[1]).open("r+b") as file:
        file.seek(60)
        file.write(b"damaged!")
    path_of(tmp_path, keys[2]).write_bytes(b"")
    with opened(tmp_path) as store:
        assert store.found(100) == [keys[3]]


def test_what_leaves_is_told_once(tmp_path: Path) -> None:
    keys = [entry_keys(1, first_token=number)[0] for number in range(8)]
    digests = [key.block.digest for key in keys]
    with opened(tmp_path, entries=5) as store:
        put(store, *keys[:6])
        assert (store.take_lost(), store.take_lost()) == ([digests[0]], [])
        store.drop([keys[1]])
        path_of(tmp_path, keys[2]).write_bytes(b"damaged")
        assert got(store, keys[2]) is None
        path_of(tmp_path, keys[3]).unlink()
        assert got(store, keys[3]) is None
        path_of(tmp_path, keys[5]).unlink()
        assert store.has(keys[5:]) == 0
        store.drop_roots(frozenset({keys[4].root}))
        assert set(store.take_lost()) == set(digests[1:6])
        assert not any(map(store.knows, digests))
        put(store, keys[6])
        assert store.knows(digests[6])
        shutil.rmtree(path_of(tmp_path, keys[6]).parent)
        put(store, keys[7])
        assert store.take_lost() == [digests[6]]


def test_a_store_that_is_made_smaller_shrinks_with_its_writes(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, *(entry_keys(1, first_token=number)[0] for number in range(30)))
    with opened(tmp_path, entries=3) as store:
        for number in range(100, 105):
            put(store, *entry_keys(1, first_token=number))
        assert store.counters().entries == 3
    assert len(files(tmp_path)) == 3


def test_a_store_without_room_for_one_entry_refuses_it(tmp_path: Path) -> None:
    with opened(tmp_path, entries=0) as store:
        assert put(store, KEYS[0]) == [False]
    assert files(tmp_path) == []


def test_files_of_another_model_leave_first(tmp_path: Path) -> None:
    with opened(tmp_path, namespace=OTHER) as store:
        put(store, *KEYS[:3])
    abandoned = path_of(tmp_path, KEYS[0], OTHER).with_name("tmp-0123")
    abandoned.write_bytes(b"part of an entry")
    with opened(tmp_path, entries=4) as store:
        assert put(store, *KEYS) == [True] * 4
        assert store.has(KEYS) == 4
    assert len(files(tmp_path)) == 4
    with opened(tmp_path, entries=4) as store:
        put(store, *entry_keys(1, first_token=9))
    assert [path.name for path in tmp_path.iterdir()] == [f"v1-{SPEC.hex()}"]


def test_files_of_another_model_are_counted_while_another_rank_removes_some(tmp_path: Path) -> None:
    with opened(tmp_path, namespace=OTHER) as other:
        put(other, *entry_keys(20))
    counted = leftovers._leftovers(tmp_path, TIMEOUT_S)
    found = {next(counted).path}
    removed = [path for path in files(tmp_path) if path not in found][:10]
    for path in removed:
        path.unlink()
    found.update(each.path for each in counted)
    assert found == set(files(tmp_path))


def test_files_of_other_models_are_counted_while_another_rank_removes_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, namespace=OTHER) as other, opened(tmp_path, namespace=b"empty"):
        put(other, *KEYS)
    is_idle = leftovers._is_idle

    def is_idle_and_removed(folder: Path) -> bool:
        idle = is_idle(folder)
        if not any(folder.iterdir()):
            folder.rmdir()
        return idle

    monkeypatch.setattr(leftovers, "_is_idle", is_idle_and_removed)
    assert leftovers.Leftovers(tmp_path, timeout_s=TIMEOUT_S).bytes == len(KEYS) * FILE_BYTES


def test_files_of_another_model_that_a_process_has_open_stay(tmp_path: Path) -> None:
    with opened(tmp_path, namespace=OTHER) as other:
        put(other, *KEYS[:3])
        with opened(tmp_path, entries=2) as store:
            put(store, *KEYS[:3])
        assert other.has(KEYS) == 3


def test_files_stay_whose_model_is_opened_again_before_they_must_leave(tmp_path: Path) -> None:
    with opened(tmp_path, namespace=OTHER) as other:
        put(other, *KEYS[:2])
    with opened(tmp_path, entries=3) as store:
        put(store, KEYS[0])
        with opened(tmp_path, namespace=OTHER) as other:
            put(store, *KEYS[1:])
            assert other.has(KEYS) == 2


# ---- other processes


def test_another_process_removes_a_file(store: FileStore, tmp_path: Path) -> None:
    put(store, *KEYS[:2])
    path_of(tmp_path, KEYS[0]).unlink()
    assert (store.has(KEYS), got(store, KEYS[0])) == (0, None)
    counters = store.counters()
    assert (counters.misses, counters.damaged, counters.failed, counters.entries) == (1, 0, 0, 1)
    assert put(store, KEYS[0]) == [True]


def test_another_process_adds_files(tmp_path: Path) -> None:
    with opened(tmp_path) as one, opened(tmp_path) as two:
        put(one, *KEYS)
        assert two.has(KEYS) == 4
        assert put(two, KEYS[0]) == [True]
        assert two.counters().written == 0
        assert got(two, KEYS[1]) == contents(KEYS[1])
        assert two.drop_roots(frozenset({root_of()})) == 4
        assert one.has(KEYS) == 0


def test_a_root_is_dropped_in_all_namespaces_of_the_directory(tmp_path: Path) -> None:
    """Those of other numbers of ranks have the same keys."""
    with opened(tmp_path, namespace=OTHER) as before:
        put(before, *KEYS, *entry_keys(1, salt="theirs"))
    with opened(tmp_path) as store:
        put(store, *KEYS[:2])
        assert store.drop_roots(frozenset({root_of()})) == 6
    assert [path.name for path in files(tmp_path)] == [str(EntryFileName.of(*entry_keys(1, salt="theirs")))]


def test_many_roots_are_dropped_in_one_pass_over_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant has a root for each of hundreds of adapters, and the directory maybe a million files."""
    salts = [f"adapter {number}" for number in range(100)]
    scandir, scanned = os.scandir, list[str]()

    def scan(path: str) -> Iterator[os.DirEntry[str]]:
        scanned.append(path)
        return scandir(path)

    with opened(tmp_path, entries=300) as store:
        put(store, *(key for salt in salts for key in entry_keys(2, salt=salt)), *KEYS)
        monkeypatch.setattr(os, "scandir", scan)
        assert store.drop_roots(frozenset(map(root_of, salts))) == 200
        monkeypatch.undo()
    assert len(scanned) == 2, "the directory and the one namespace in it"
    assert len(files(tmp_path)) == len(KEYS)


def test_what_a_killed_writer_left_of_a_root_is_dropped_too(tmp_path: Path) -> None:
    """It is a tenant's KV, though no store would read it."""
    assert run(tmp_path, "half", "0").returncode == -signal.SIGKILL
    (temporary,) = files(tmp_path)
    with opened(tmp_path) as store:
        assert store.drop_roots(frozenset({root_of()})) == 0
        assert temporary.exists(), "its writer may be alive"
        long_ago_s = time.time() - 300.0
        os.utime(temporary, (long_ago_s, long_ago_s))
        assert store.drop_roots(frozenset({root_of("theirs")})) == 0
        assert temporary.exists()
        assert store.drop_roots(frozenset({root_of()})) == 1
    assert files(tmp_path) == []


def test_a_root_whose_files_cannot_all_be_removed_is_not_dropped(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, *KEYS)
    unlink = os.unlink

    def unlink_but_one(path: str) -> None:
        if Path(path).name == str(EntryFileName.of(KEYS[1])):
            raise PermissionError(errno.EPERM, "not permitted")
        unlink(path)

    monkeypatch.setattr(os, "unlink", unlink_but_one)
    assert store.drop_roots(frozenset({root_of()})) is None
    monkeypatch.undo()
    assert store.drop_roots(frozenset({root_of()})) == 1


def test_a_folder_that_cannot_be_read_is_not_a_drop(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, *KEYS)

    def refuse(path: str) -> Iterator[os.DirEntry[str]]:
        raise PermissionError(errno.EACCES, "not permitted", path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert store.drop_roots(frozenset({root_of()})) is None


def test_stores_that_share_a_directory_keep_to_its_size(tmp_path: Path) -> None:
    with opened(tmp_path, entries=8) as one, opened(tmp_path, entries=8) as two:
        for number in range(40):
            put((one, two)[number % 2], *entry_keys(1, first_token=number))
            assert len(files(tmp_path)) <= 9


def test_a_writer_that_is_killed_in_mid_write_leaves_nothing_to_read(tmp_path: Path) -> None:
    done = run(tmp_path, "half", "0")
    assert done.returncode == -signal.SIGKILL
    (temporary,) = files(tmp_path)
    assert temporary.name.startswith("tmp-")
    with opened(tmp_path) as store:
        assert (store.has(KEYS), got(store, entry_keys(1)[0])) == (0, None)
        assert put(store, KEYS[0]) == [True]
        assert got(store, KEYS[0]) == contents(KEYS[0])
        assert temporary.exists(), "its writer may be alive"


def test_what_killed_writers_left_is_removed_after_an_hour(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, KEYS[0])
    old, new = (path_of(tmp_path, KEYS[0]).with_name(f"tmp-{name}") for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"part of an entry")
    os.utime(old, (0, time.time() - 3700))
    with opened(tmp_path):
        assert (old.exists(), new.exists()) == (False, True)


def test_two_processes_write_and_read_the_same_entries(tmp_path: Path) -> None:
    children = [start(tmp_path, "many", str(number)) for number in range(2)]
    assert [child.communicate(timeout=TIMEOUT_S)[0] for child in children] == ["0 damaged\n"] * 2
    with opened(tmp_path, entries=10) as store:
        assert store.counters().entries <= 11
        kept = [key for number in range(12) for key in entry_keys(2, first_token=number) if store.has([key])]
        assert kept
        assert [got(store, key) for key in kept] == [contents(key) for key in kept]


CHILD = f"""
import os, signal, sys
from pathlib import Path
from random import Random
from tests.unit.kvtransfer.stores.test_files import contents, got, opened, put
from tests.unit.kvtransfer.stores.entries import entry_keys

folder, what, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
with opened(folder, entries=10) as store:
    if what == "half":
        real = os.pwritev
        def half(fd, buffers, offset):
            real(fd, buffers[:1], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        os.pwritev = half
        put(store, *entry_keys(1))
    elif what == "limit":
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, ({HEADER_BYTES + 100}, {HEADER_BYTES + 100}))
        print(put(store, *entry_keys(2)), store.counters().failed, store.has(entry_keys(2)))
    elif what == "many":
        random = Random(number)
        for _ in range(100):
            first, *_ = keys = entry_keys(2, first_token=random.randrange(12))
            put(store, *keys)
            for key in keys:
                assert got(store, key) in (None, contents(key))
        counters = store.counters()
        assert counters.failed == 0 and counters.hits > 0
        print(counters.damaged, "damaged")
"""


def start(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", CHILD, str(folder), *arguments], stdout=subprocess.PIPE, text=True)


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), *arguments], stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S
    )


# ---- disks that fail


def failing(number: int) -> Callable[..., int]:
    def fail(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


def test_files_that_may_not_be_that_large_are_not_kept(tmp_path: Path) -> None:
    """The limit ends a write in its middle, as a full disk does."""
    assert run(tmp_path, "limit", "0").stdout == "[False, False] 2 0\n"
    assert files(tmp_path) == []


def test_writes_that_fail_are_logged_but_not_each_of_them(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", failing(errno.EROFS))
        put(store, *KEYS)
    assert [(record.levelname, str(tmp_path) in record.getMessage()) for record in caplog.records] == [
        ("WARNING", True)
    ]
    assert os.strerror(errno.EROFS) in caplog.text


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_a_write_that_fails_is_counted_and_leaves_nothing(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", failing(number))
        assert put(store, KEYS[0]) == [False]
    counters = store.counters()
    assert (counters.failed, counters.written, counters.entries) == (1, 0, 0)
    assert files(tmp_path) == []
    assert put(store, KEYS[0]) == [True]


def test_on_a_full_disk_the_store_goes_on_with_the_room_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, real = 3, os.pwritev

    def write(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if len(files(tmp_path)) > room:  # with the one that is being written
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", write)
    with opened(tmp_path) as store:
        done = [put(store, *entry_keys(1, first_token=number))[0] for number in range(10)]
    assert done == [True, True, True, False, True, False, True, False, True, False]


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EMFILE, errno.ESTALE])
@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_read_that_fails_is_a_miss_and_is_counted(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    put(store, KEYS[0])
    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing(number))
        assert got(store, KEYS[0]) is None
    counters = store.counters()
    assert (counters.failed, counters.misses, counters.damaged) == (1, 1, 0)
    assert got(store, KEYS[0]) == contents(KEYS[0]), "the file is whole, and was not removed"


def test_a_filesystem_that_needs_its_page_cache_gets_it(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    memory = memoryview(mmap.mmap(-1, ENTRY_BYTES))
    memory[:] = contents(KEYS[0])
    assert store.put(KEYS[0], memory)
    memory[:] = bytes(ENTRY_BYTES)
    assert store.get(KEYS[0], memory)
    assert bytes(memory) == contents(KEYS[0])


def test_calls_that_the_kernel_ends_early_are_continued(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: write(fd, [buffers[0][:1000]], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: read(fd, [buffers[0][:999]], offset))
    assert put(store, KEYS[0]) == [True]
    assert got(store, KEYS[0]) == contents(KEYS[0])


def test_a_directory_that_cannot_be_made_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with opened(tmp_path / "file" / "folder") as store:
        assert (put(store, KEYS[0]), store.has(KEYS), got(store, KEYS[0])) == ([False], 0, None)
        store.drop(KEYS)
        assert store.drop_roots(frozenset({root_of()})) == 0
        assert store.counters().failed > 0
        assert store.counters().entries == 0


def test_a_missing_directory_is_made(tmp_path: Path) -> None:
    with opened(tmp_path / "a" / "b") as store:
        assert put(store, KEYS[0]) == [True]


def test_a_directory_that_is_deleted_is_made_again(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, *KEYS)
        for path in files(tmp_path):
            path.unlink()
        path_of(tmp_path, KEYS[0]).parent.rmdir()
        assert (got(store, KEYS[0]), store.has(KEYS)) == (None, 0)
        assert put(store, *KEYS[:2]) == [False, True]
        assert (store.counters().failed, store.counters().entries) == (1, 1)
        with opened(tmp_path, entries=0, namespace=OTHER) as other:
            put(other, KEYS[0])
        assert store.has(KEYS[1:]) == 1, "the folder is locked again"


# ---- calls at the same time


def test_an_entry_that_is_dropped_while_it_is_written_is_not_kept(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwritev
    drops: list[Callable[[], object]] = [
        lambda: store.drop([KEYS[0]]),
        lambda: store.drop_roots(frozenset({root_of()})),
    ]

    def write(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        drops.pop()()
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", write)
    assert put(store, KEYS[0], KEYS[0]) == [False, False]
    assert files(tmp_path) == []
    assert store.counters().entries == 0


def test_a_miss_ends_no_write_of_the_same_entry(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev

    def write(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        assert got(store, KEYS[0]) is None
        assert not store.put(KEYS[0], memoryview(contents(KEYS[0])))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", write)
    assert put(store, KEYS[0]) == [True]
    assert got(store, KEYS[0]) == contents(KEYS[0])


def test_close_waits_for_a_write_and_later_calls_are_refused(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real, events = os.pwritev, list[str]()

    def close() -> None:
        store.close()
        events.append("closed")

    closer = threading.Thread(target=close)

    def write(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        closer.start()
        end_s = time.monotonic() + TIMEOUT_S
        # Until it waits, or has not waited.
        while not store._ended._waiters and "closed" not in events:  # type: ignore[attr-defined]
            assert time.monotonic() < end_s
        moved = real(fd, buffers, offset)
        events.append("written")
        return moved

    monkeypatch.setattr(os, "pwritev", write)
    assert put(store, KEYS[0]) == [True]
    closer.join()
    assert events == ["written", "closed"]
    assert (put(store, KEYS[1]), got(store, KEYS[0])) == ([False], None)
