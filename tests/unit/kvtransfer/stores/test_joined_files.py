"""Files of nodes with another number of ranks: joined, they are the entries that this rank would have kept."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.core.kv_entries import EntryKey
from baton.kvcache.spec import KVCacheSpec
from kvtransfer.entry_cuts import complete
from kvtransfer.stores.entry import EntryLayout
from kvtransfer.stores.file_format import HEADER_BYTES
from kvtransfer.stores.files import FileStore
from kvtransfer.stores.joined_files import JoinedFiles, joined_files
from tests.unit.kvtransfer.offloading import keys_of
from tests.unit.kvtransfer.test_entry_cuts import INDEX, KEY, SMALL, SPECS, WITH_STATES, a_state, an_entry, layout_of

HEADS = SPECS["heads"]
KEYS = keys_of(4)
CHANGES = [(1, 2), (2, 1), (2, 4), (4, 2), (4, 1), (1, 4)]


def named(namespace: bytes) -> bytes:
    return b"model" + namespace


@contextmanager
def opened(folder: Path, spec: KVCacheSpec, ranks: int, *, max_bytes: int = 1 << 30) -> Iterator[list[FileStore]]:
    """The stores of a node's ranks, which have started at the same time."""
    layouts = [layout_of(spec, rank, ranks) for rank in range(ranks)]
    found = [joined_files(folder, layout, spec, named) for layout in layouts]
    with ExitStack() as stack:
        stores = []
        for layout, joined in zip(layouts, found, strict=True):
            store = FileStore(
                folder,
                namespace=named(layout.namespace),
                entry_bytes=layout.entry_bytes,
                max_bytes=max_bytes,
                joined=joined,
            )
            stack.callback(store.close)
            stores.append(store)
        yield stores


def entry_of(key: EntryKey, spec: KVCacheSpec, rank: int, ranks: int) -> Tensor:
    """What a rank keeps of an entry; of all entries it is the same but for their trailers."""
    layout, entry = layout_of(spec, rank, ranks), an_entry(layout_of(spec, rank, ranks), spec, rank, ranks)
    complete(layout, (key, layout.messages), entry, between=lambda: None)
    return entry


def leave(folder: Path, spec: KVCacheSpec, ranks: int, keys: Sequence[EntryKey] = KEYS) -> None:
    """Lets a node write entries and end."""
    with opened(folder, spec, ranks) as stores:
        for rank, store in enumerate(stores):
            for key in keys:
                assert store.put(key, entry_of(key, spec, rank, ranks).numpy().data)


def got(store: FileStore, key: EntryKey, layout: EntryLayout) -> Tensor | None:
    into = torch.zeros(layout.entry_bytes, dtype=torch.uint8)
    return into if store.get(key, into.numpy().data) else None


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


@pytest.mark.parametrize("spec", [*SPECS.values(), replace(HEADS, index=INDEX)], ids=[*SPECS, "heads and index"])
@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_every_rank_reads_what_it_would_have_kept(tmp_path: Path, spec: KVCacheSpec, before: int, after: int) -> None:
    leave(tmp_path, spec, before)
    with opened(tmp_path, spec, after) as stores:
        for rank, store in enumerate(stores):
            assert store.has(KEYS) == len(KEYS)
            assert store.first(KEYS) == 0
            for key in KEYS:
                found = got(store, key, layout_of(spec, rank, after))
                assert found is not None
                assert torch.equal(found, entry_of(key, spec, rank, after))
            counters = store.counters()
            assert (counters.hits, counters.misses, counters.damaged) == (len(KEYS), 0, 0)


@pytest.mark.parametrize("name", WITH_STATES)
@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_every_rank_reads_the_state_that_it_would_have_kept(tmp_path: Path, name: str, before: int, after: int) -> None:
    spec = WITH_STATES[name]
    with opened(tmp_path, spec, before) as stores:
        for rank, store in enumerate(stores):
            layout = layout_of(spec, rank, before)
            for key, piece in zip(layout.state_keys(KEY), a_state(layout, spec, KEY), strict=True):
                filled = torch.cat([piece, torch.zeros(layout.entry_bytes - len(piece), dtype=torch.uint8)])
                assert store.put(key, filled.numpy().data)
    with opened(tmp_path, spec, after) as stores:
        for rank, store in enumerate(stores):
            layout = layout_of(spec, rank, after)
            others = layout.state_keys(KEYS[1])
            assert store.first([others[-1], layout.last_state_key(KEY)]) == 1
            for key, piece in zip(layout.state_keys(KEY), a_state(layout, spec, KEY), strict=True):
                found = got(store, key, layout)
                assert found is not None
                assert torch.equal(found[: len(piece)], piece)
            assert got(store, others[0], layout) is None


def test_a_state_with_a_missing_piece_is_not_found(tmp_path: Path) -> None:
    spec = WITH_STATES["heads of a layer"]
    layout = layout_of(spec, 0, 1)
    with opened(tmp_path, spec, 1) as (store,):
        keys = layout.state_keys(KEY)
        assert all(store.put(key, torch.zeros(layout.entry_bytes).byte().numpy().data) for key in keys[1:])
    with opened(tmp_path, spec, 2) as stores:
        assert [store.first([layout_of(spec, 0, 2).last_state_key(KEY)]) for store in stores] == [1, 1]


HARMS: dict[str, Callable[[bytes], bytes]] = {
    "a bit": lambda data: data[: HEADER_BYTES + 9] + bytes([data[HEADER_BYTES + 9] ^ 1]) + data[HEADER_BYTES + 10 :],
    "truncated": lambda data: data[:-1],
    "a header's bit": lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:],
    "empty": lambda _: b"",
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_damaged_file_is_a_miss_and_is_counted_and_removed(
    tmp_path: Path, harm: str, before: int, after: int
) -> None:
    leave(tmp_path, HEADS, before, KEYS[:2])
    harmed = [path for path in files(tmp_path) if path.name.startswith(KEYS[0].block.digest.hex())][-1]
    harmed.write_bytes(HARMS[harm](harmed.read_bytes()))
    with opened(tmp_path, HEADS, after) as (store, *_):
        assert got(store, KEYS[0], layout_of(HEADS, 0, after)) is None
        assert (store.counters().misses, store.counters().damaged) == (1, 1)
        assert not [path for path in files(tmp_path) if path.name == harmed.name]
        assert got(store, KEYS[1], layout_of(HEADS, 0, after)) is not None


def test_an_entry_of_which_one_rank_has_lost_its_share_is_missing(tmp_path: Path) -> None:
    leave(tmp_path, HEADS, 2)
    next(path for path in files(tmp_path) if path.name.startswith(KEYS[2].block.digest.hex())).unlink()
    with opened(tmp_path, HEADS, 1) as (store,):
        assert store.has(KEYS) == 2
        assert got(store, KEYS[2], layout_of(HEADS, 0, 1)) is None
        assert (store.counters().misses, store.counters().damaged) == (1, 0)
        assert store.found(10) == list(KEYS[:2])


def test_own_files_and_those_of_two_other_numbers_of_ranks_make_one_sequence(tmp_path: Path) -> None:
    leave(tmp_path, HEADS, 1, KEYS[2:3])
    leave(tmp_path, HEADS, 4, KEYS[1:2])
    leave(tmp_path, HEADS, 2, [KEYS[0], KEYS[3]])
    with opened(tmp_path, HEADS, 2) as stores:
        for rank, store in enumerate(stores):
            assert store.has(KEYS) == len(KEYS)
            for key in KEYS:
                found = got(store, key, layout_of(HEADS, rank, 2))
                assert found is not None
                assert torch.equal(found, entry_of(key, HEADS, rank, 2))
            assert [store.knows(key.block.digest) for key in KEYS] == [True, False, False, True]


def test_a_model_of_another_dtype_or_shape_reads_nothing(tmp_path: Path) -> None:
    leave(tmp_path, HEADS, 2)
    for other in (replace(HEADS, dtype="float16"), replace(HEADS, head_dim=3), replace(HEADS, num_kv_heads=8)):
        with opened(tmp_path, other, 1) as (store,):
            assert store.has(KEYS) == 0


def test_a_node_that_meets_only_own_files_asks_for_nothing_more(tmp_path: Path) -> None:
    leave(tmp_path, HEADS, 2)
    leave(tmp_path, replace(HEADS, head_dim=3), 1)
    assert joined_files(tmp_path, layout_of(HEADS, 1, 2), HEADS, named) == ()
    assert joined_files(tmp_path / "missing", layout_of(HEADS, 1, 2), HEADS, named) == ()
    # Several ranks hold the index, or each KV head.
    for spec, ranks in ((replace(HEADS, index=INDEX), 2), (replace(HEADS, num_kv_heads=2, state=SMALL), 4)):
        layouts = [layout_of(spec, rank, ranks) for rank in range(ranks)]
        with opened(tmp_path, spec, ranks):
            assert not any(joined_files(tmp_path, layout, spec, named) for layout in layouts)
    # Ranks of any number that keep the same have the same files.
    leave(tmp_path, SPECS["latent"], 1)
    assert joined_files(tmp_path, layout_of(SPECS["latent"], 1, 2), SPECS["latent"], named) == ()


def test_dropped_entries_and_those_of_a_dropped_tenant_do_not_come_back(tmp_path: Path) -> None:
    mine, theirs = keys_of(2, salt="mine"), keys_of(2, salt="theirs")
    leave(tmp_path, HEADS, 2, [*mine, *theirs])
    with opened(tmp_path, HEADS, 1) as (store,):
        store.drop(theirs[1:])
        assert store.has(theirs) == 1
        assert store.drop_roots(frozenset([mine[0].root])) == 4
        assert (store.has(mine), store.has(theirs)) == (0, 1)
    assert len(files(tmp_path)) == 2


def test_they_leave_before_own_files(tmp_path: Path) -> None:
    leave(tmp_path, HEADS, 2)
    own = keys_of(3, seed=1)
    file_bytes = HEADER_BYTES + layout_of(HEADS, 0, 1).entry_bytes
    with opened(tmp_path, HEADS, 1, max_bytes=3 * file_bytes) as (store,):
        assert store.found(10) == list(KEYS)
        for key in own:
            assert store.put(key, entry_of(key, HEADS, 0, 1).numpy().data)
        assert set(store.take_lost()) == {key.block.digest for key in KEYS}
        assert store.has(KEYS) == 0
        assert got(store, KEYS[0], layout_of(HEADS, 0, 1)) is None
        assert store.has(own) == 3
        assert store.take_lost() == []


def test_files_that_leave_while_they_are_listed_are_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(tmp_path, HEADS, 2)
    list_files = JoinedFiles.found
    with opened(tmp_path, HEADS, 1, max_bytes=3 * (HEADER_BYTES + layout_of(HEADS, 0, 1).entry_bytes)) as (store,):

        def list_and_write(joined: JoinedFiles, most: int) -> list[EntryKey]:
            listed = list_files(joined, most)
            assert listed == list(KEYS)
            for key in keys_of(3, seed=1):
                assert store.put(key, entry_of(key, HEADS, 0, 1).numpy().data)
            return listed

        monkeypatch.setattr(JoinedFiles, "found", list_and_write)
        assert store.found(10) == []
        assert set(store.take_lost()) <= {key.block.digest for key in KEYS}


def test_an_entry_that_has_a_file_of_its_own_is_not_lost_with_the_old_ones(tmp_path: Path) -> None:
    leave(tmp_path, HEADS, 2)
    layout = layout_of(HEADS, 0, 1)
    with opened(tmp_path, HEADS, 1, max_bytes=3 * (HEADER_BYTES + layout.entry_bytes)) as (store,):
        store.found(10)
        for key in (KEYS[0], *keys_of(2, seed=1)):
            assert store.put(key, entry_of(key, HEADS, 0, 1).numpy().data)
        assert set(store.take_lost()) == {key.block.digest for key in KEYS[1:]}
        assert store.has(KEYS[:1]) == 1


def test_a_found_entry_whose_file_another_process_has_removed_is_lost_once_it_is_missed(tmp_path: Path) -> None:
    leave(tmp_path, HEADS, 2)
    layout = layout_of(HEADS, 0, 1)
    with opened(tmp_path, HEADS, 1) as (store,):
        store.has(keys_of(1, seed=1))
        assert store.found(10) == list(KEYS)
        for key in KEYS[:3]:
            next(path for path in files(tmp_path) if path.name.startswith(key.block.digest.hex())).unlink()
        assert store.take_lost() == []
        assert store.has(KEYS) == 0
        assert store.take_lost() == [KEYS[0].block.digest]
        assert got(store, KEYS[1], layout) is None
        assert store.take_lost() == [KEYS[1].block.digest]
        assert got(store, KEYS[3], layout) is not None
        store.drop([KEYS[2]])
        assert store.take_lost() == [KEYS[2].block.digest]
        store.drop_roots(frozenset([KEYS[3].root]))
        assert store.take_lost() == [KEYS[3].block.digest]
