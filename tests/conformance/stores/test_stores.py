"""The behaviour of every store of entries, in one suite."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from baton.core.kv_entries import EntryKey, KeepTime
from kvtransfer.stores.store import Store
from tests.conformance.stores.stores import ENTRY_BYTES, STORES, StoreMaker
from tests.unit.kvtransfer.stores.entries import entry_keys, entry_of, root_of

THREADS = 6


@pytest.fixture(params=STORES, ids=lambda maker: maker.name)
def maker(request: pytest.FixtureRequest) -> StoreMaker:
    made: StoreMaker = request.param
    return made


@pytest.fixture
def store(maker: StoreMaker, tmp_path: Path) -> Iterator[Store]:
    with maker.open(tmp_path) as opened:
        yield opened


def contents(key: EntryKey) -> bytes:
    return entry_of(key, ENTRY_BYTES)


def put(store: Store, *keys: EntryKey) -> None:
    for key in keys:
        assert store.put(key, memoryview(contents(key)))


def got(store: Store, key: EntryKey) -> bytes | None:
    into = memoryview(bytearray(ENTRY_BYTES))
    return bytes(into) if store.get(key, into) else None


def test_what_was_put_is_got_byte_by_byte(store: Store) -> None:
    keys = entry_keys(8)
    put(store, *keys)
    assert [got(store, key) for key in keys] == [contents(key) for key in keys]


def test_an_entry_of_zeros_is_an_entry(store: Store) -> None:
    (key,) = entry_keys(1)
    assert store.put(key, memoryview(bytes(ENTRY_BYTES)))
    assert got(store, key) == bytes(ENTRY_BYTES)


def test_a_store_keeps_a_copy(store: Store) -> None:
    (key,) = entry_keys(1)
    entry = bytearray(contents(key))
    assert store.put(key, memoryview(entry))
    entry[:] = bytes(ENTRY_BYTES)
    assert got(store, key) == contents(key)


def test_an_empty_store_has_nothing(store: Store) -> None:
    keys = entry_keys(2)
    assert (store.has(keys), store.has([]), got(store, keys[0])) == (0, 0, None)


def test_has_counts_the_leading_entries(store: Store) -> None:
    keys = entry_keys(5)
    put(store, keys[0], keys[1], keys[3])
    assert [store.has(keys), store.has(keys[:2]), store.has(keys[2:]), store.has(keys[3:])] == [2, 2, 0, 1]


def test_the_same_tokens_of_another_root_are_another_entry(store: Store) -> None:
    """Tenants' salts, models and adapters have roots of their own."""
    (ours,), (theirs,) = entry_keys(1, salt="ours"), entry_keys(1, salt="theirs")
    put(store, ours)
    assert (store.has([theirs]), got(store, theirs)) == (0, None)
    put(store, theirs)
    assert (got(store, ours), got(store, theirs)) == (contents(ours), contents(theirs))


def test_keys_whose_digests_begin_alike_are_different(store: Store) -> None:
    (key,), (other,) = entry_keys(1, salt="ours"), entry_keys(1, salt="theirs")
    digest = key.block.digest[:8] + other.block.digest[8:]
    alike = other._replace(block=other.block._replace(digest=digest))
    put(store, key)
    assert (store.has([alike]), got(store, alike)) == (0, None)
    put(store, alike)
    assert (got(store, key), got(store, alike)) == (contents(key), contents(alike))


@pytest.mark.parametrize("what", ["tokens", "parent", "root"])
def test_a_key_of_equal_digest_and_another_content_gets_nothing(store: Store, what: str) -> None:
    """A digest may be found again by an attacker; the answer must not be another prompt's KV."""
    (key,) = entry_keys(1)
    other = {
        "tokens": key._replace(block=key.block._replace(tokens=key.block.tokens[::-1])),
        "parent": key._replace(block=key.block._replace(parent=root_of("other"))),
        "root": key._replace(root=root_of("other")),
    }[what]
    put(store, key)
    assert got(store, other) is None


def test_an_entry_is_written_once(maker: StoreMaker, store: Store) -> None:
    (key,) = entry_keys(1)
    put(store, key, key, key)
    assert store.counters().written == 1
    assert store.counters().entries == 1 or not maker.counts
    assert got(store, key) == contents(key)


def test_dropped_entries_are_gone_and_the_others_stay(store: Store) -> None:
    keys = entry_keys(4)
    put(store, *keys)
    store.drop([keys[3], keys[1]])
    store.drop(entry_keys(2, salt="unknown"))
    assert [got(store, key) for key in keys] == [contents(keys[0]), None, contents(keys[2]), None]
    assert store.has(keys) == 1


def test_a_dropped_entry_may_be_put_again(store: Store) -> None:
    (key,) = entry_keys(1)
    put(store, key)
    store.drop([key])
    put(store, key)
    assert got(store, key) == contents(key)


def test_the_first_of_some_keys_that_are_in_no_sequence_is_found(store: Store) -> None:
    keys = entry_keys(300)
    assert store.first(keys) == 300
    put(store, keys[290], keys[297])
    assert store.first(keys) == 290
    assert store.first(keys[::-1]) == 2
    assert store.first([]) == 0


def test_a_store_remembers_what_it_has_until_that_is_dropped(store: Store) -> None:
    keys = entry_keys(3)
    digests = [key.block.digest for key in keys]
    assert not any(map(store.knows, digests))
    put(store, *keys)
    assert all(map(store.knows, digests))
    store.take_lost()
    store.drop(keys[2:])
    assert list(map(store.knows, digests)) == [True, True, False]
    store.drop_roots(frozenset({keys[0].root}))
    assert not any(map(store.knows, digests))
    put(store, keys[0])
    assert store.knows(digests[0])


def test_a_root_is_dropped_with_all_of_its_entries(store: Store) -> None:
    # A store for a cluster still has what other tests have left of other salts.
    ours, theirs = entry_keys(4, salt="dropped"), entry_keys(3, salt="theirs")
    put(store, *ours, *theirs)
    assert store.drop_roots(frozenset({root_of("dropped")})) == 4
    assert store.drop_roots(frozenset({root_of("dropped")})) == 0
    assert [got(store, key) for key in ours] == [None] * 4
    assert [got(store, key) for key in theirs] == [contents(key) for key in theirs]


def test_several_roots_are_dropped_at_once(store: Store) -> None:
    salts = [f"adapter {number}" for number in range(70)]
    kept = entry_keys(2, salt="theirs")
    put(store, *(key for salt in salts[:2] + salts[-1:] for key in entry_keys(2, salt=salt)), *kept)
    assert store.drop_roots(frozenset(map(root_of, salts))) == 6
    assert store.has(kept) == 2


def test_a_keep_time_changes_nothing_but_what_leaves_first(store: Store) -> None:
    keys = entry_keys(4)
    put(store, *keys[:3])
    store.keep(keys, KeepTime(300.0, 1))
    store.keep(keys, KeepTime(0.0, 1))
    assert [got(store, key) for key in keys] == [contents(key) for key in keys[:3]] + [None]
    store.drop(keys)
    assert store.has(keys) == 0


def test_hits_misses_entries_and_bytes_are_counted(maker: StoreMaker, store: Store) -> None:
    keys = entry_keys(3)
    put(store, *keys[:2])
    for key in keys:
        got(store, key)
    counters = store.counters()
    assert (counters.hits, counters.misses, counters.written) == (2, 1, 2)
    if maker.counts:
        assert counters.entries == 2
        assert counters.bytes >= 2 * ENTRY_BYTES
    assert (counters.damaged, counters.failed) == (0, 0)


def test_threads_that_put_get_and_drop_get_an_entry_or_nothing(store: Store) -> None:
    keys = entry_keys(12, salt="a") + entry_keys(12, salt="b")

    def work(number: int) -> list[EntryKey]:
        random, wrong = Random(number), []
        for _ in range(150):
            key = random.choice(keys)
            match random.randrange(8):
                case 0:
                    store.drop([key])
                case 1 | 2 | 3:
                    store.put(key, memoryview(contents(key)))
                case _:
                    if got(store, key) not in (None, contents(key)):
                        wrong.append(key)
        store.has(keys)
        return wrong

    with ThreadPoolExecutor(THREADS) as pool:
        assert [wrong for found in pool.map(work, range(THREADS)) for wrong in found] == []
    counters = store.counters()
    assert (counters.damaged, counters.failed) == (0, 0)
    put(store, *keys)
    assert [got(store, key) for key in keys] == [contents(key) for key in keys]


def test_threads_that_put_the_same_entries_put_them_once_or_say_no(store: Store) -> None:
    keys = entry_keys(8)
    with ThreadPoolExecutor(THREADS) as pool:
        done = list(pool.map(lambda _: [store.put(key, memoryview(contents(key))) for key in keys], range(THREADS)))
    assert all(any(each) for each in zip(*done, strict=True))
    assert [got(store, key) for key in keys] == [contents(key) for key in keys]


@pytest.mark.parametrize(
    "maker", [each for each in STORES if each.survives], indirect=True, ids=lambda maker: maker.name
)
def test_a_store_that_is_opened_again_has_what_it_had(maker: StoreMaker, tmp_path: Path) -> None:
    keys = entry_keys(6, salt="before")
    with maker.open(tmp_path) as store:
        put(store, *keys)
        store.drop(keys[5:])
    with maker.open(tmp_path) as store:
        assert store.has(keys) == 5
        assert store.counters().entries == 5 or not maker.counts
        assert [got(store, key) for key in keys[:5]] == [contents(key) for key in keys[:5]]
        assert store.drop_roots(frozenset({keys[0].root})) == 5
    with maker.open(tmp_path) as store:
        assert store.has(keys) == 0
