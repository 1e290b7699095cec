"""The stores outside of a node's cache, as its settings ask for them, and what its status says of them."""

import errno
import hashlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

from baton.core.errors import ConfigError
from baton.core.kv_entries import DroppedEntries
from baton.engine.build import BuiltRunner
from baton.metrics.exposition import Figure
from baton.protos.v1 import node_status_pb2, operations_pb2
from baton.settings.config import listed
from baton.settings.node_config import NodeSettings
from kvtransfer.offload_tiers import HOST, PEER
from kvtransfer.records import EntryCounters
from kvtransfer.settings import OpenStore
from kvtransfer.stores.entry import EntryLayout
from kvtransfer.stores.files import FileStore
from kvtransfer.stores.mooncake import FIELD, FORM, open_mooncake, parse_mooncake_url
from kvtransfer.stores.store import Store, StoreCounters

_FILE = "file://"
_log = logging.getLogger(__name__)


def check_stores(settings: NodeSettings) -> None:
    """Checks what the settings say of stores, before a process starts to load for long.

    Raises:
        ConfigError: a store is given without host memory, its address is wrong, or its directory cannot be used.
    """
    if settings.kv_store and not settings.host_cache_bytes:
        raise ConfigError(
            f"{FIELD} is {settings.kv_store}, and there is no host memory for KV, through which every entry goes",
            field=FIELD,
            value=settings.kv_store,
            cure="give --host-cache-gib above 0"
            if settings.prefix_cache
            else "give --host-cache-gib above 0, and --prefix-cache true",
        )
    directory, url = _addresses(settings.kv_store)
    if directory is not None:
        _check_directory(directory)
    if url is not None:
        parse_mooncake_url(url)


def keeps_kv(settings: NodeSettings, built: BuiltRunner) -> bool:
    """Whether a node keeps KV outside of its cache. Logs why it does not although its settings ask for it."""
    if settings.host_cache_bytes and built.cache.state is not None:
        _log.warning("KV is kept in the cache alone: the model has recurrent states, which stores cannot keep yet")
        return False
    return settings.host_cache_bytes > 0


def open_stores(settings: NodeSettings, built: BuiltRunner) -> tuple[OpenStore, ...]:
    """What opens the stores below host memory of one rank, in the order in which they are asked."""
    origin = _origin(settings, built)
    stores: list[OpenStore] = []
    directory, url = _addresses(settings.kv_store)
    if directory is not None:
        stores.append(partial(_open_files, directory, settings.file_cache_bytes, origin))
    if url is not None:
        stores.append(partial(_open_shared, url, origin))
    return tuple(stores)


def pull_namespace(settings: NodeSettings, built: BuiltRunner, layout: EntryLayout) -> bytes:
    """A digest of what the entries of a node mean, from those of its rank 0: nodes with equal ones may use each other's
    entries, rank by rank."""
    return _joined(_joined(layout.namespace, _origin(settings, built)), b"%d ranks" % built.parallel.size)


def with_failed_pulls(counters: EntryCounters, failures: int) -> EntryCounters:
    """The totals of all ranks, with the node's pulls that failed."""
    if not failures:
        return counters
    peers = replace(counters.stores.get(PEER, StoreCounters()), failed=failures)
    return replace(counters, stores={**counters.stores, PEER: peers})


def store_states(counters: EntryCounters) -> Iterator[node_status_pb2.StoreState]:
    """Describes host memory, then the stores below it."""
    for name, store in _by_name(counters):
        yield node_status_pb2.StoreState(
            name=name,
            entries=store.entries,
            bytes=store.bytes,
            loaded_total=counters.loaded.get(name, 0),
            damaged_total=store.damaged,
            failed_total=store.failed,
        )


def store_drops(dropped: DroppedEntries) -> Iterator[operations_pb2.StoreKvDrop]:
    """Describes what each store has dropped."""
    for name in dict.fromkeys((*dropped.counts, *dropped.left)):
        yield operations_pb2.StoreKvDrop(
            name=name, entries=dropped.counts.get(name, 0), error=dropped.left.get(name, "")
        )


def store_figures(counters: EntryCounters) -> Iterator[Figure]:
    """The metrics of host memory and of the stores below it."""
    for name, store in _by_name(counters):
        yield Figure("baton_kv_store_bytes", store.bytes, (name,))
        events = {
            "saved": store.written,
            "loaded": counters.loaded.get(name, 0),
            "evicted": store.evicted,
            "damaged": store.damaged,
            "failed": store.failed,
        }
        for event, count in events.items():
            yield Figure("baton_kv_store_entries_total", count, (name, event))
    yield Figure("baton_kv_store_entries_total", counters.served, (PEER, "served"))


def _by_name(counters: EntryCounters) -> Iterator[tuple[str, StoreCounters]]:
    """The totals of host memory and of the stores below it. A damaged entry counts where it was, whether the store or
    the load found the damage."""
    host = StoreCounters(
        entries=counters.entries,
        bytes=counters.bytes,
        written=counters.saved,
        evicted=counters.evicted,
        failed=counters.failed,
    )
    for name, store in {HOST: host, **counters.stores}.items():
        yield name, replace(store, damaged=store.damaged + counters.damaged_from.get(name, 0))


def _addresses(given: str) -> tuple[Path | None, str | None]:
    """The directory and the URL of the shared store in the setting `kv_store`; None: it has none.

    Raises:
        ConfigError: an address is no directory's, where a shared store's is given already, or two directories are.
    """
    directories = [each for each in listed(given) if each.startswith(_FILE)]
    others = [each for each in listed(given) if not each.startswith(_FILE)]
    for number, each in [*enumerate(directories), *enumerate(others)]:
        path = each.removeprefix(_FILE)
        if number or (each.startswith("file:") and not path.startswith("/")) or each.startswith("/"):
            raise ConfigError(
                f"{FIELD} has {each}",
                field=FIELD,
                value=each,
                allowed=("file:///path", FORM),
                cure="give at most one directory and one shared store, comma-separated",
            )
    return Path(directories[0].removeprefix(_FILE)) if directories else None, others[0] if others else None


def _check_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return  # a full disk has files of ours, maybe, and the store makes room among them
        raise ConfigError(
            f"{FIELD} has {directory}, where no file can be written: {error.strerror}",
            field=FIELD,
            value=str(directory),
            cure="give a directory on a disk of this host that the node's user may write to",
        ) from None


def _open_files(directory: Path, max_bytes: int, origin: bytes, namespace: bytes, entry_bytes: int) -> Store:
    return FileStore(directory, namespace=_joined(namespace, origin), entry_bytes=entry_bytes, max_bytes=max_bytes)


def _open_shared(url: str, origin: bytes, namespace: bytes, entry_bytes: int) -> Store:
    return open_mooncake(url, _joined(namespace, origin), entry_bytes)


def _joined(namespace: bytes, origin: bytes) -> bytes:
    return hashlib.blake2b(namespace + origin, digest_size=len(namespace)).digest()


def _origin(settings: NodeSettings, built: BuiltRunner) -> bytes:
    """A digest of what the numbers of the KV depend on, apart from the tokens: nodes with equal origins may use each
    other's KV.

    The keys of entries cover the model too, but only samples of its weights. In batch-invariant mode the KV must be
    that which this kind of device computes. Random weights differ between kinds of devices.
    """
    identity, device = built.identity, built.cache.view.device.type
    exact = settings.batch_invariant or settings.load_format == "dummy"
    facts = (
        identity.config_digest,
        identity.weights_digest,
        identity.content_digest,
        str(built.dtype),
        built.config.max_context_tokens,
        settings.batch_invariant,
        device if exact else "",
    )
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).digest()
