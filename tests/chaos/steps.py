"""Named steps of the hand-over between a prefill and a decode node, at which a forked node can be made to die.

Each step is before or after a call of the product. `die_at` runs in the node's process before it starts.
"""

import errno
import functools
import importlib
import inspect
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from baton.core.kv_entries import EntryKey


@dataclass(frozen=True)
class Step:
    """A call of the product.

    Attributes:
        before: the node dies before the call; else after it.
    """

    module: str
    owner: str
    method: str
    before: bool = False


_PEER, _PEERS = "prefill_node.decode_peer", "prefill_node.decode_peers"
_RANKED, _ENTRIES = "kvtransfer.ranked", "kvtransfer.ranked_entries"
_LEASES = "kvtransfer.ranked_leases"
# Either role keeps KV outside of its cache, and sends it to others.
_KEPT = {
    "has saved KV": Step(_ENTRIES, "RankedEntries", "save_entries"),
    "loads KV": Step(_ENTRIES, "RankedEntries", "load_entries", before=True),
    "names a file": Step("kvtransfer.stores.files", "FileStore", "_end", before=True),
    "begins a pull": Step(_ENTRIES, "RankedEntries", "begin_pull"),
    "serves a pull": Step(_ENTRIES, "RankedEntries", "serve_pull", before=True),
    "has served a pull": Step(_ENTRIES, "RankedEntries", "serve_pull"),
}
_PREFILL = {
    "has said hello": Step(_PEER, "DecodePeer", "_introduce"),
    "listens": Step(_RANKED, "RankedTransfer", "listen"),
    "connects its links": Step(_RANKED, "RankedTransfer", "connect", before=True),
    "has connected its links": Step(_RANKED, "RankedTransfer", "connect"),
    "has sent the warm-up": Step(_RANKED, "RankedTransfer", "warm_up"),
    "has paired": Step(_PEER, "DecodePeer", "_handshake"),
    "has a ticket": Step(_PEERS, "DecodePeers", "for_ticket"),
    "sends KV": Step("kvtransfer.sender", "Sender", "_post"),
    "has sent KV": Step(_RANKED, "RankedTransfer", "send"),
    "hands over": Step(_PEERS, "DecodePeers", "send", before=True),
    "has handed over": Step(_PEERS, "DecodePeers", "send"),
    "becomes quiet": Step(_RANKED, "RankedTransfer", "quiet"),
    **_KEPT,
}
_DECODE = {
    "has accepted the hello": Step(_RANKED, "RankedTransfer", "listen"),
    "connects its links": Step(_RANKED, "RankedTransfer", "connect", before=True),
    "has connected its links": Step(_RANKED, "RankedTransfer", "connect"),
    "waits for the warm-up": Step(_RANKED, "RankedTransfer", "warmed_up", before=True),
    "has measured": Step(_RANKED, "RankedTransfer", "warmed_up"),
    "opens a lease": Step(_LEASES, "RankedLeases", "open_lease", before=True),
    "has opened a lease": Step(_LEASES, "RankedLeases", "open_lease"),
    "receives KV": Step("kvtransfer.receiver", "Receiver", "_scattered"),
    "has all KV": Step("decode_node.driver", "DecodeDriver", "_on_filled"),
    "closes a lease": Step(_LEASES, "RankedLeases", "close_filled", before=True),
    "has closed a lease": Step(_LEASES, "RankedLeases", "close_filled"),
    **_KEPT,
}
PREFILL_STEPS, DECODE_STEPS = tuple(_PREFILL), tuple(_DECODE)
_DAMAGED_EVERY = 5
_CUT_SHARE = 0.2


def step_of(role: str, name: str) -> Step:
    return (_PREFILL if role == "prefill" else _DECODE)[name]


def die_at(step: Step) -> None:
    """In a node's process: it is killed at the step."""
    owner = getattr(importlib.import_module(step.module), step.owner)
    method = getattr(owner, step.method)
    setattr(owner, step.method, _deadly(method, before=step.before))


def damage_segments() -> None:
    """In a prefill node's process: of the segments that it sends, every fifth loses a bit after its digest is made."""
    from kvtransfer.sender import Sender

    post = Sender._post
    count = 0

    def post_damaged(self: Sender, item: Any) -> Any:
        nonlocal count
        count += 1
        if count % _DAMAGED_EVERY == 0 and item.job.lease is not None:
            item.slot.memory[item.segment.payload_bytes // 2] ^= 1
        return post(self, item)

    Sender._post = post_damaged  # type: ignore[method-assign]


def damage_host_memory() -> None:
    """In a node's process: every fifth entry that is read in host memory has lost a bit."""
    from kvtransfer.stores.host_memory import HostMemory, HostPlace

    pin = HostMemory.pin
    count = 0

    def pin_damaged(self: HostMemory, key: EntryKey) -> HostPlace | None:
        nonlocal count
        place = pin(self, key)
        count += 1
        if place is not None and count % _DAMAGED_EVERY == 0:
            place.tensor[count % len(place.tensor)] ^= 1 << count % 8
        return place

    HostMemory.pin = pin_damaged  # type: ignore[method-assign]


def fill_disk() -> None:
    """In a node's process: two of three writes of files fail because the disk is full, each after a part."""
    pwritev = os.pwritev
    count = 0

    def write_part(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal count
        count += 1
        if count % 3 == 0:
            return pwritev(fd, buffers, offset)
        pwritev(fd, buffers[:1], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.pwritev = write_part  # type: ignore[assignment]


def rot(directory: Path, random: Random) -> None:
    """Damages a tenth of the files of KV in a directory, under the eyes of the nodes that read and write there."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    for path in random.sample(files, -(-len(files) // 10)):
        with suppress(OSError), path.open("r+b") as file:
            size = os.fstat(file.fileno()).st_size
            if not size or random.random() < _CUT_SHARE:
                file.truncate(random.randint(0, size))
                continue
            place = random.randrange(size)
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes((byte ^ 1 << random.randrange(8),)))


def _deadly(method: Callable[..., Any], *, before: bool) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def killed_later(*args: Any, **kwargs: Any) -> Any:
            if not before:
                await method(*args, **kwargs)
            _die()

        return killed_later

    @functools.wraps(method)
    def killed(*args: Any, **kwargs: Any) -> Any:
        if not before:
            method(*args, **kwargs)
        _die()

    return killed


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
