"""Entries of KV in a real Mooncake Store over TCP, and what a node notices when parts of the store fail."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import shake_128
from pathlib import Path

import pytest

from baton.core.block_keys import BlockKey
from baton.core.kv_entries import ENTRY_TOKENS, EntryKey
from kvtransfer.stores.mooncake import HEADER_BYTES, MooncakeStore, open_mooncake
from kvtransfer.stores.mooncake_process import MooncakeProcess
from kvtransfer.stores.store import Store
from tests.clients.mooncake_cluster import DEADLINE_S, MEMORY_MB, MooncakeCluster, mooncake_cluster, until

ENTRY_BYTES = 64 << 10
ROOT, OTHER_ROOT = b"r" * 16, b"s" * 16
MASTER, MEMORY = "mooncake_master", "mooncake_client"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeCluster]:
    with mooncake_cluster(tmp_path_factory.mktemp("mooncake")) as cluster:
        yield cluster


@pytest.fixture
def fragile(tmp_path: Path) -> Iterator[MooncakeCluster]:
    """A cluster for one test, which may end parts of it."""
    with mooncake_cluster(tmp_path) as cluster:
        yield cluster


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> bytes:
    """One for each test."""
    return str(request.node.name).encode()


class Node:
    """A store as a node opens it, with short pauses."""

    def __init__(self, port: int, namespace: bytes, entry_bytes: int, timeout_s: float) -> None:
        self.process = MooncakeProcess("127.0.0.1", port, HEADER_BYTES + entry_bytes, timeout_s=timeout_s, pause_s=0.1)
        self.store = MooncakeStore(self.process, namespace, entry_bytes)

    def __enter__(self) -> "Node":
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()


def node(
    cluster: MooncakeCluster,
    namespace: bytes = b"model",
    *,
    entry_bytes: int = ENTRY_BYTES,
    timeout_s: float = DEADLINE_S,
) -> Node:
    opened = Node(cluster.port, namespace, entry_bytes, timeout_s)
    assert opened.process.wait_ready(DEADLINE_S)
    return opened


def entry_key(index: int, root: bytes = ROOT) -> EntryKey:
    tokens = index.to_bytes(4, "little") * ENTRY_TOKENS
    return EntryKey(
        BlockKey(shake_128(tokens).digest(16), tokens, shake_128(b"parent" + tokens).digest(16)), root, index
    )


def content(index: int, entry_bytes: int = ENTRY_BYTES) -> bytes:
    return shake_128(b"%d" % index).digest(entry_bytes)


def write(store: Store, key: EntryKey, entry: bytes) -> bool:
    return store.put(key, memoryview(entry))


def read(store: Store, key: EntryKey, entry_bytes: int = ENTRY_BYTES) -> bytes | None:
    into = bytearray(entry_bytes)
    return bytes(into) if store.get(key, memoryview(into)) else None


def test_an_entry_that_one_node_puts_is_read_by_another(cluster: MooncakeCluster, namespace: bytes) -> None:
    with node(cluster, namespace) as writer, node(cluster, namespace) as reader:
        assert reader.store.has([entry_key(1)]) == 0
        assert read(reader.store, entry_key(1)) is None
        assert write(writer.store, entry_key(1), content(1))
        assert reader.store.has([entry_key(1)]) == 1
        assert read(reader.store, entry_key(1)) == content(1)
        counters = reader.store.counters()
        assert (counters.hits, counters.misses, counters.failed, counters.damaged) == (1, 1, 0, 0)


def test_what_the_store_has_is_not_written_again(cluster: MooncakeCluster, namespace: bytes) -> None:
    with node(cluster, namespace) as one, node(cluster, namespace) as other:
        assert write(one.store, entry_key(1), content(1))
        assert write(one.store, entry_key(1), content(1))
        assert write(other.store, entry_key(1), content(1))
        assert (one.store.counters().written, other.store.counters().written) == (1, 0)


def test_the_first_keys_that_are_there_are_counted(cluster: MooncakeCluster, namespace: bytes) -> None:
    """Of more keys than one message has room for."""
    keys = [entry_key(index) for index in range(600)]
    with node(cluster, namespace, entry_bytes=4096) as opened:
        for index, key in enumerate(keys):
            assert write(opened.store, key, content(index, 4096))
        assert opened.store.has(keys) == 600
        assert opened.store.has([*keys, entry_key(1000)]) == 600
        assert opened.store.has([]) == 0
        for missing in (0, 255, 256, 511, 512, 599):
            opened.store.drop([keys[missing]])
            assert opened.store.has(keys) == missing
            assert write(opened.store, keys[missing], content(missing, 4096))


def test_an_equal_digest_with_other_tokens_is_a_miss(cluster: MooncakeCluster, namespace: bytes) -> None:
    key = entry_key(1)
    others = [
        key._replace(block=key.block._replace(tokens=b"x" * len(key.block.tokens))),
        key._replace(block=key.block._replace(parent=b"p" * 16)),
        key._replace(number=7),
    ]
    with node(cluster, namespace) as opened:
        write(opened.store, key, content(1))
        assert [read(opened.store, other) for other in others] == [None] * 3
        assert opened.store.counters().misses == 3
        assert read(opened.store, key) == content(1)


def test_models_and_tenants_do_not_share_entries(cluster: MooncakeCluster, namespace: bytes) -> None:
    with node(cluster, namespace) as ours, node(cluster, namespace + b" of another model") as theirs:
        write(ours.store, entry_key(1), content(1))
        assert read(ours.store, entry_key(1, OTHER_ROOT)) is None
        assert read(theirs.store, entry_key(1)) is None


@pytest.mark.parametrize("entry_bytes", [ENTRY_BYTES // 2, ENTRY_BYTES * 2])
def test_an_entry_of_another_size_is_damaged_and_makes_room(
    cluster: MooncakeCluster, namespace: bytes, entry_bytes: int
) -> None:
    with node(cluster, namespace, entry_bytes=entry_bytes) as other, node(cluster, namespace) as ours:
        write(other.store, entry_key(1), content(1, entry_bytes))
        assert read(ours.store, entry_key(1)) is None
        counters = ours.store.counters()
        assert (counters.misses, counters.damaged, counters.failed) == (1, 1, 0)
        assert write(ours.store, entry_key(1), content(1))
        assert read(ours.store, entry_key(1)) == content(1)


def test_a_foreign_object_is_damaged_and_makes_room(cluster: MooncakeCluster, namespace: bytes) -> None:
    key = entry_key(1)
    with node(cluster, namespace) as ours:
        with ours.process.lane() as lane:
            assert lane is not None
            lane.memory[:HEADER_BYTES] = b"?" * HEADER_BYTES
            name = f"baton/{namespace.hex()}/{key.root.hex()}/{key.block.digest.hex()}"
            assert lane.call("put", [name]) == [0]
        assert ours.store.has([key]) == 1
        assert read(ours.store, key) is None
        assert ours.store.counters().damaged == 1
        assert ours.store.has([key]) == 0


def test_dropped_entries_are_gone_for_every_node(cluster: MooncakeCluster, namespace: bytes) -> None:
    keys = [entry_key(index) for index in range(3)]
    with node(cluster, namespace) as one, node(cluster, namespace) as other:
        for index, key in enumerate(keys):
            write(one.store, key, content(index))
        assert read(other.store, keys[2]) is not None  # a lease of a reader keeps nothing
        one.store.drop([keys[1], keys[2], entry_key(99)])
        assert [read(other.store, key) is None for key in keys] == [False, True, True]


def test_a_tenants_entries_of_all_ranks_are_dropped_and_no_others(cluster: MooncakeCluster, namespace: bytes) -> None:
    tenant = b"t" * 16
    with node(cluster, namespace) as one, node(cluster, namespace + b"2") as another_rank:
        for index in range(3):
            write(one.store, entry_key(index, tenant), content(index))
            write(one.store, entry_key(index, OTHER_ROOT), content(index))
            write(another_rank.store, entry_key(index, tenant), content(index))
        adapters = [bytes([number]) * 16 for number in range(100)]
        write(one.store, entry_key(0, adapters[-1]), content(0))
        assert one.store.drop_roots(frozenset({tenant, *adapters})) == 7
        assert one.store.drop_roots(frozenset({tenant})) == 0
        assert read(one.store, entry_key(1, tenant)) is None
        assert read(another_rank.store, entry_key(1, tenant)) is None
        assert read(one.store, entry_key(1, OTHER_ROOT)) == content(1)


def test_threads_get_their_own_entries(cluster: MooncakeCluster, namespace: bytes) -> None:
    with node(cluster, namespace) as opened, ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda index: write(opened.store, entry_key(index), content(index)), range(64)))
        assert list(pool.map(lambda index: read(opened.store, entry_key(index)), range(64))) == [
            content(index) for index in range(64)
        ]


def test_an_entry_that_does_not_fit_is_refused(cluster: MooncakeCluster, namespace: bytes) -> None:
    large = (MEMORY_MB + 16) << 20
    with node(cluster, namespace, entry_bytes=large) as opened:
        assert not write(opened.store, entry_key(1), bytes(large))
        assert not opened.store.has([entry_key(1)])
        assert (opened.store.counters().failed, opened.store.counters().written) == (1, 0)


def test_a_full_store_takes_new_entries_in_place_of_old_ones(cluster: MooncakeCluster, namespace: bytes) -> None:
    entry_bytes, root = 4 << 20, b"u" * 16
    count = 2 * MEMORY_MB // 4
    keys = [entry_key(index, root) for index in range(count)]
    with node(cluster, namespace, entry_bytes=entry_bytes) as opened:
        for key in keys:
            until(partial(write, opened.store, key, content(0, entry_bytes)))
        assert sum(opened.store.has([key]) for key in keys) < count
        dropped = opened.store.drop_roots(frozenset({root}))
        assert dropped is not None
        assert dropped < count


def test_a_node_starts_before_its_store(tmp_path: Path) -> None:
    with mooncake_cluster(tmp_path) as cluster:
        cluster.close()
        store = open_mooncake(cluster.url, b"model", ENTRY_BYTES)
        try:
            assert store.has([entry_key(1)]) == 0
            assert not write(store, entry_key(1), content(1))
            cluster.start_master()
            cluster.start_memory()
            until(lambda: write(store, entry_key(1), content(1)))
            assert store.has([entry_key(1)]) == 1
        finally:
            store.close()


def test_a_dead_master_is_a_miss_until_it_is_back(fragile: MooncakeCluster) -> None:
    with node(fragile) as opened:
        write(opened.store, entry_key(1), content(1))
        fragile.close()
        assert opened.store.has([entry_key(1)]) == 0
        assert read(opened.store, entry_key(1)) is None
        assert not write(opened.store, entry_key(2), content(2))
        counters = opened.store.counters()
        assert (counters.hits, counters.misses, counters.written, counters.failed) == (0, 1, 1, 1)
        fragile.start_master()
        fragile.start_memory()
        until(lambda: write(opened.store, entry_key(1), content(1)))
        assert read(opened.store, entry_key(1)) == content(1)


def test_a_hung_master_costs_one_call_its_bound(fragile: MooncakeCluster, caplog: pytest.LogCaptureFixture) -> None:
    with node(fragile, timeout_s=1.0) as opened:
        write(opened.store, entry_key(1), content(1))
        fragile.signal(MASTER, signal.SIGSTOP)
        assert read(opened.store, entry_key(1)) is None
        assert [read(opened.store, entry_key(1)) for _ in range(100)] == [None] * 100
        counters = opened.store.counters()
        assert (counters.misses, counters.failed) == (101, 1)
        fragile.signal(MASTER, signal.SIGCONT)
        until(lambda: read(opened.store, entry_key(1)) == content(1))
    assert "timed out; not asked for" in caplog.text


def test_hung_memory_costs_its_bound_and_dead_memory_is_a_miss(fragile: MooncakeCluster) -> None:
    with node(fragile, timeout_s=1.0) as opened:
        write(opened.store, entry_key(1), content(1))
        fragile.signal(MEMORY, signal.SIGSTOP)
        assert read(opened.store, entry_key(1)) is None
        assert opened.store.counters().failed == 1
        fragile.signal(MEMORY, signal.SIGCONT)
        until(lambda: read(opened.store, entry_key(1)) == content(1))
        fragile.kill(MEMORY)
        assert read(opened.store, entry_key(1)) is None


def test_a_killed_client_process_is_replaced(cluster: MooncakeCluster, namespace: bytes) -> None:
    with node(cluster, namespace) as opened:
        write(opened.store, entry_key(1), content(1))
        assert opened.process.pid is not None
        os.kill(opened.process.pid, signal.SIGKILL)
        until(lambda: read(opened.store, entry_key(1)) == content(1))


def test_the_client_process_ends_with_a_node_that_is_killed(cluster: MooncakeCluster) -> None:
    program = (
        "import sys, time; from kvtransfer.stores.mooncake_process import MooncakeProcess\n"
        "process = MooncakeProcess('127.0.0.1', int(sys.argv[1]), 4096)\n"
        "process.wait_ready(60); print(process.pid, flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", program, str(cluster.port)], stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
    finally:
        owner.kill()
        owner.communicate()
    until(lambda: not runs(pid))


def runs(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_closed_store_has_nothing(cluster: MooncakeCluster, namespace: bytes) -> None:
    with node(cluster, namespace) as opened:
        write(opened.store, entry_key(1), content(1))
        pid = opened.process.pid
    assert pid is not None
    assert not runs(pid)
    assert opened.store.has([entry_key(1)]) == 0
    assert read(opened.store, entry_key(1)) is None
    assert not write(opened.store, entry_key(2), content(2))
    opened.store.drop([entry_key(1)])
    assert opened.store.drop_roots(frozenset({ROOT})) is None
