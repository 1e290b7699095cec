"""Mooncake Store passes the suite that every store of entries passes, with a real cluster."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtransfer.stores.mooncake import open_mooncake
from kvtransfer.stores.store import Store
from tests.clients.mooncake_cluster import MooncakeCluster, mooncake_cluster
from tests.conformance.stores.stores import ENTRY_BYTES, StoreMaker
from tests.conformance.stores.test_stores import *  # noqa: F403


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeCluster]:
    with mooncake_cluster(tmp_path_factory.mktemp("mooncake")) as cluster:
        yield cluster


@pytest.fixture  # type: ignore[no-redef]
def maker(cluster: MooncakeCluster) -> StoreMaker:
    """Opens the store with a namespace for each folder."""

    @contextmanager
    def opened(folder: Path) -> Iterator[Store]:
        store = open_mooncake(cluster.url, str(folder).encode(), ENTRY_BYTES)
        try:
            yield store
        finally:
            store.close()

    return StoreMaker("mooncake", opened, survives=True, counts=False)
