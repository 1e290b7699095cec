"""The stores outside of a node's cache, as its settings ask for them, and what its status says of them."""

import errno
import hashlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

from baton.core.errors import ConfigError
from baton.core.kv_entries import DroppedEntries
from baton.engine.build import BuiltRunner
from baton.kvcache.spec import KVCacheSpec
from baton.metrics.exposition import Figure
from baton.models.layers.parallel import TensorParallel
from baton.protos.v1 import node_status_pb2, operations_pb2
from baton.settings.node_config import NodeSettings
from kvtransfer.offload_calls import HOST
from kvtransfer.offload_tiers import PEER
from kvtransfer.parts import parts_of
from kvtransfer.records import EntryCounters
from kvtransfer.settings import OpenStore
from kvtransfer.stores.entry import EntryLayout
from kvtransfer.stores.files import FileStore
from kvtransfer.stores.joined_files import joined_files
from kvtransfer.stores.mooncake import MooncakeStore, open_mooncake, parse_mooncake_url
from kvtransfer.stores.store import Store, StoreCounters


def check_stores(settings: NodeSettings) -> None:
    """Checks the settings of stores before a process starts a long load.

    Raises:
        ConfigError: a store is given without host memory, its address is wrong, or its directory cannot be used.
    """
    below = {"file_cache_dir": settings.file_cache_dir, "kv_store": settings.kv_store}
    for field, value in below.items():
        if value is not None and not settings.host_cache_bytes:
            raise ConfigError(
                f"{field} is {value}, and there is no host memory for KV, through which every entry goes",
                field=field,
                value=str(value),
                cure="give --host-cache-gib above 0"
                if settings.prefix_cache
                else "give --host-cache-gib above 0, and --prefix-cache true",
            )
    if settings.file_cache_dir is not None:
        _check_directory(settings.file_cache_dir)
    if settings.kv_store is not None:
        parse_mooncake_url(settings.kv_store)


def open_stores(settings: NodeSettings, built: BuiltRunner) -> tuple[OpenStore, ...]:
    """Returns functions that open the stores below host memory of one rank, in the order in which they are searched."""
    origin = _origin(settings, built)
    stores: list[OpenStore] = []
    if settings.file_cache_dir is not None:
        directory, max_bytes = settings.file_cache_dir, settings.file_cache_bytes
        stores.append(partial(_open_files, directory, max_bytes, origin, built.model_spec))
    if settings.kv_store is not None:
        stores.append(partial(_open_shared, settings.kv_store, origin))
    return tuple(stores)


def pull_namespace(settings: NodeSettings, built: BuiltRunner) -> bytes:
    """A digest of all that the entries of a node depend on, over all its ranks. Nodes with equal digests may use each
    other's entries."""
    namespace = _joined(EntryLayout(parts_of(built.model_spec)).namespace, _origin(settings, built))
    return _joined(namespace, b"%d ranks" % built.parallel.size) if settings.batch_invariant else namespace


def shared_store(settings: NodeSettings, built: BuiltRunner, namespace: bytes) -> bytes:
    """A digest of the store that the node shares with others, and of all that its entries depend on. Nodes with equal
    digests read each other's entries there. Empty: the node shares no store.

    Args:
        namespace: of rank 0's entries.
    """
    if settings.kv_store is None:
        return b""
    host, port = parse_mooncake_url(settings.kv_store)
    where = f"{host}:{port}, {built.parallel.size} ranks".encode()
    return _joined(_joined(namespace, _origin(settings, built)), where)


def with_failed_pulls(counters: EntryCounters, failures: int) -> EntryCounters:
    """The totals of all ranks, with the node's pulls that failed."""
    if not failures:
        return counters
    peers = replace(counters.stores.get(PEER, StoreCounters()), failed=failures)
    return replace(counters, stores={**counters.stores, PEER: peers})


def store_states(counters: EntryCounters, *, shared: bytes = b"") -> Iterator[node_status_pb2.StoreState]:
    """Describes host memory, then the stores below it.

    Args:
        shared: of the store that several nodes have in common, see `shared_store`.
    """
    for name, store in _by_name(counters):
        yield node_status_pb2.StoreState(
            name=name,
            entries=store.entries,
            bytes=store.bytes,
            loaded_total=counters.loaded.get(name, 0),
            damaged_total=store.damaged,
            failed_total=store.failed,
            reads_total=store.reads,
            read_s_total=store.read_s,
            shared=shared if name == MooncakeStore.name else b"",
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


def _check_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return  # a full disk may hold our own files, among which the store makes room
        raise ConfigError(
            f"file_cache_dir is {directory}, where no file can be written: {error.strerror}",
            field="file_cache_dir",
            value=str(directory),
            cure="give a directory on a disk of this host that the node's user may write to",
        ) from None


def _open_files(directory: Path, max_bytes: int, origin: bytes, model_spec: KVCacheSpec, layout: EntryLayout) -> Store:
    named = partial(_joined, origin=origin)
    return FileStore(
        directory,
        namespace=named(layout.namespace),
        entry_bytes=layout.entry_bytes,
        max_bytes=max_bytes,
        joined=joined_files(directory, layout, model_spec, named),
    )


def _open_shared(url: str, origin: bytes, layout: EntryLayout) -> Store:
    return open_mooncake(url, _joined(layout.namespace, origin), layout.entry_bytes)


def _joined(namespace: bytes, origin: bytes) -> bytes:
    return hashlib.blake2b(namespace + origin, digest_size=len(namespace)).digest()


def _split(parallel: TensorParallel) -> str:
    """How the model is split among ranks, which decides the partial sums."""
    shared = ", whole shared experts" if parallel.sends_to_experts else ""
    whole, own = parallel.whole_experts, parallel.own_attention
    return f"{parallel.size} ranks, whole experts {whole}, own attention {own}{shared}"


def _origin(settings: NodeSettings, built: BuiltRunner) -> bytes:
    """A digest of all that the values of KV depend on, apart from the tokens. Nodes with equal origins may use each
    other's KV.

    The keys of entries cover the model too, but only samples of its weights. In batch-invariant mode the KV
    must come from the same kind of device and the same number of ranks: ranks add other partial sums than one process
    does, so the last bits differ. Random weights differ between kinds of devices.
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
        *((True,) if settings.batch_invariant else ()),  # earlier versions also had rows that are not in order
        device if exact else "",
        *((identity.draft_digest,) if identity.draft_digest else ()),
        *((_split(built.parallel),) if settings.batch_invariant and built.parallel.size > 1 else ()),
    )
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).digest()
