"""Mooncake Store passes the suite of all stores, with a real cluster that each test finds empty."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtransfer.stores.mooncake import open_mooncake
from kvtransfer.stores.mooncake_process import MooncakeProcess
from kvtransfer.stores.store import Store
from tests.clients.mooncake_cluster import DEADLINE_S, MooncakeCluster, mooncake_cluster
from tests.conformance.stores.stores import ENTRY_BYTES, StoreMaker
from tests.conformance.stores.test_stores import *  # noqa: F403


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeCluster]:
    with mooncake_cluster(tmp_path_factory.mktemp("mooncake")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cleaner(cluster: MooncakeCluster) -> Iterator[MooncakeProcess]:
    process = MooncakeProcess("127.0.0.1", cluster.port, ENTRY_BYTES)
    assert process.wait_ready(DEADLINE_S)
    yield process
    process.close()


@pytest.fixture  # type: ignore[no-redef]
def maker(cluster: MooncakeCluster, cleaner: MooncakeProcess) -> StoreMaker:
    """Opens the store with a namespace for each folder. Other tests' entries are removed, because a root is dropped in
    all namespaces."""
    with cleaner.lane() as lane:
        assert lane is not None
        (removed,) = lane.call("remove_matching", ["^.*$"], DEADLINE_S)
        assert removed >= 0

    @contextmanager
    def opened(folder: Path) -> Iterator[Store]:
        store = open_mooncake(cluster.url, str(folder).encode(), ENTRY_BYTES)
        try:
            yield store
        finally:
            store.close()

    return StoreMaker("mooncake", opened, survives=True, counts=False)
