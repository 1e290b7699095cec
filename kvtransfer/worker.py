"""The transfer thread of one rank: owns its transport, staging and mover, so it gathers, digests and scatters.

Other threads post calls, which it runs in order; it answers through futures and callbacks.
"""

import logging
import math
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from baton.core.errors import BatonError, Draining, InternalError
from baton.core.kv_entries import DroppedEntries
from baton.kvcache.cache import PagedKVCache
from kvtransfer.entry_pulls import EntryPulls
from kvtransfer.ledger import Ledger
from kvtransfer.movers.mover import MakeMover, Mover
from kvtransfer.naps import Naps
from kvtransfer.offload import Offloader
from kvtransfer.offload_tiers import EntryTiers
from kvtransfer.pacing import wake_punctually
from kvtransfer.peer_links import PeerLinks
from kvtransfer.posted_calls import PostedCalls
from kvtransfer.rank_transfer import OnFailed, OnFilled, OnLinkFailed, OnRefused, OnStoresChanged
from kvtransfer.receiver import Receiver
from kvtransfer.records import EntryLink, PullJob
from kvtransfer.sender import Sender
from kvtransfer.settings import TransferSettings
from kvtransfer.staging import Pools, StagingPool
from kvtransfer.transports.table import open_transport
from kvtransfer.transports.transport import Arrival, Transport

T = TypeVar("T")

log = logging.getLogger("baton")

# The longest wait, in case an event is lost: with open leases, and without.
_WAIT_LEASED_MS = 20
_WAIT_IDLE_MS = 200
# The longest wait while a GPU copies saves.
_WAIT_SAVES_MS = 2
# After this time the links are served before further calls: opening a link takes 20 ms, and many may be waiting.
_CALLS_S = 5e-3
# During pulls messages advance for so long, as long as they do, before the thread's other parts have their turn.
# Without it an entry of 8 MiB over shared memory took 10 to 27 turns, and their Python a quarter of the CPU time; now
# it takes 6 or 7.
_PULL_PROGRESS_S = 1e-3
_CLOSE_TIMEOUT_S = 2.0


class TransferThread:
    """Runs from `start` to `stop`. Posted calls use `links`, `sender`, `receiver`, `pulls`, `offloader` and the methods
    marked "on the thread".

    Args:
        tiers: for the entries of the cache, which the thread opens but does not close; None: none are kept.
        on_filled, on_refused: called on the thread.
        on_link_failed: called on the thread with the number of a peer whose link has broken. Disconnect it.
        on_stores_changed: called on the thread with what has changed in the stores.
        on_failed: called on the thread when it cannot go on, before the waiting calls fail.
        clock: for the receiver; the thread's own waits use the monotonic clock.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        settings: TransferSettings,
        *,
        tiers: EntryTiers | None,
        make_mover: MakeMover,
        on_filled: OnFilled,
        on_refused: OnRefused,
        on_link_failed: OnLinkFailed,
        on_failed: OnFailed,
        on_stores_changed: OnStoresChanged,
        clock: Callable[[], float],
    ) -> None:
        self.ledger = Ledger()
        self._cache = cache
        self._settings = settings
        self._tiers = tiers
        self._make_mover = make_mover
        self._on_filled = on_filled
        self._on_refused = on_refused
        self._on_link_failed = on_link_failed
        self._on_failed = on_failed
        self._on_stores_changed = on_stores_changed
        self._clock = clock
        self._calls = PostedCalls()
        self._failed = False
        self._stopping = False
        self._turned_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="kvtransfer", daemon=True)
        self._started: Future[None] = Future()
        self.mover: Mover
        self.transport: Transport
        self.sender: Sender
        self.receiver: Receiver
        self.links: PeerLinks
        self.offloader: Offloader
        self.pulls: EntryPulls

    # ---- from other threads

    def start(self) -> "Future[None]":
        """Starts the thread; the future is done when the transport is open."""
        self._calls.open()
        self._thread.start()
        return self._started

    def call(self, function: Callable[["Future[T]"], None], *, is_urgent: bool = True) -> "Future[T]":
        """Runs a function on the thread. The function, or what it begins, completes the future that it receives.

        Args:
            is_urgent: the thread polls without long naps for a while, because more happens soon.
        """
        return self._calls.post(function, is_urgent=is_urgent)

    def stop(self) -> None:
        """Cancels what is in flight, closes the transport and waits until the thread has ended."""
        if not self._calls.is_open:
            return

        def end(future: "Future[None]") -> None:
            self._stopping = True
            future.set_result(None)

        self.call(end)
        self._thread.join()
        self._calls.close()

    @property
    def stalled_s(self) -> float:
        """Age of the thread's current turn: far below a second while it works, infinite once it has failed."""
        if self._failed:
            return math.inf
        return time.monotonic() - self._turned_s if self._thread.is_alive() else 0.0

    def where(self) -> str:
        """The thread's Python stack, or that it has failed; for log lines about a stuck thread."""
        if self._failed:
            return "the thread has failed; its error is above"
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else "the thread has ended"

    # ---- on the thread

    def begin_pull(self, job: PullJob, links: tuple[EntryLink, ...], future: "Future[int]") -> None:
        for link in links:
            self.links.check_connected(link.peer)
        self.pulls.receiver.begin(job, links, future)

    def serve_pull(self, link: EntryLink, job: PullJob, future: "Future[int]") -> None:
        self.links.check_connected(link.peer)
        self.pulls.sender.serve(link, job, future)

    def drop_roots(self, roots: frozenset[bytes], future: "Future[DroppedEntries]") -> None:
        for root in roots:
            self.pulls.drop_root(root)
        self.offloader.drop_roots(roots, future)

    def _run(self) -> None:
        try:
            self._open()
        except Exception as error:  # noqa: BLE001  (the caller of `start` gets it)
            self._end(error)
            return
        ended: BatonError = InternalError("the transfer is closed")
        try:
            self._loop()
            self._drain()
        except Exception as error:
            self._failed = True
            log.exception("the transfer thread failed")
            # Not an internal error: gateways then continue its requests elsewhere.
            ended = Draining(f"the transfer thread failed, so the node ends: {error}", cure="use another node")
            self._on_failed(ended)
        try:
            self._close()
        except Exception:  # after a GPU has failed, every further call to it fails
            log.exception("the transfer thread could not close")
        finally:
            self._end(ended)

    def _end(self, error: Exception) -> None:
        """Fails every waiting and every later call with this error."""
        if not self._started.done():
            self._started.set_exception(error)
        self._calls.fail(error)

    def _open(self) -> None:
        # The mover first: it makes the cache's GPU current on this thread, and the transport opens on that GPU.
        self.mover = self._make_mover(self._cache, lambda: self.transport.progress())
        self.transport = open_transport(self._settings.transport, on_gpu=self.mover.on_gpu)
        if self.mover.on_gpu:
            wake_punctually()
        parts = self._cache, self.mover, self.transport, self.ledger
        self.sender = Sender(*parts, self._pools(), self._settings)
        self.receiver = Receiver(
            *parts,
            self._pools(),
            self._settings,
            on_filled=self._on_filled,
            on_refused=self._on_refused,
            on_entry=self._entry_arrived,
            catch_up=self._calls.run,
            clock=self._clock,
        )
        if self._tiers is not None:
            self._tiers.open(self.mover.open_host_memory)
            self.offloader = Offloader(self.mover, self._tiers, self._clock)
            self.pulls = EntryPulls(self._tiers, self.transport, self._clock)
        self.links = PeerLinks(
            self.ledger,
            self.transport,
            self.sender,
            self.receiver,
            None if self._tiers is None else self.pulls,
            on_gpu=self.mover.on_gpu,
            clock=self._clock,
        )
        self._started.set_result(None)

    def _pools(self) -> Pools:
        def opened(*, through_host: bool) -> StagingPool:
            settings = self._settings
            return self.mover.open_pool(
                slot_bytes=settings.message_bytes, slots=settings.staging_slots, through_host=through_host
            )

        return Pools(direct=partial(opened, through_host=False), in_host=partial(opened, through_host=True))

    def _loop(self) -> None:
        poll = select.poll()
        poll.register(self._calls.fileno(), select.POLLIN)
        poll.register(self.transport.fileno(), select.POLLIN)
        naps = Naps(on_gpu=self.mover.on_gpu)
        happened_s = time.monotonic()
        while not self._stopping:
            self._turned_s = time.monotonic()
            if self._advance():
                happened_s = time.monotonic()
                continue
            quiet_s = time.monotonic() - happened_s
            if (nap := naps.next_s(quiet_s, is_awaited=self._is_awaited, is_saving=self._in_flight > 0)) is not None:
                time.sleep(nap)
            elif self.transport.arm():
                poll.poll(self._longest_wait_ms())
                # Here and not with the calls: a call may run before its wake-up arrives.
                self._calls.take_wake_up()

    def _longest_wait_ms(self) -> int:
        if self._in_flight:
            return _WAIT_SAVES_MS
        limited_s = self.receiver.limited_s
        if limited_s is not None:
            return min(math.ceil(limited_s * 1e3), _WAIT_LEASED_MS)
        is_waiting = self.receiver.open_leases or (self._tiers is not None and self._tiers.is_busy)
        return _WAIT_LEASED_MS if is_waiting else _WAIT_IDLE_MS

    def _advance(self) -> bool:
        """Advances every part once. Returns whether anything happened in one of them that somebody waits for."""
        results = (
            self._calls.run(within_s=_CALLS_S),
            self._progress(),
            self.receiver.step(),
            self.sender.step(),
            self._tiers is not None and self.offloader.step() and self.offloader.is_awaited,
            self._tiers is not None and self.pulls.step(),
        )
        if self._tiers is not None and (changes := self.offloader.take_changes()) is not None:
            self._on_stores_changed(changes)
        for peer, error in self.transport.failures():
            self._on_link_failed(peer, error)
        self.links.finish_disconnects()
        return any(results)

    def _progress(self) -> bool:
        """Lets messages advance, during pulls for a while at a time. Returns whether anything happened."""
        if not self.transport.progress():
            return False
        if self._tiers is not None and self.pulls.in_flight:
            end_s = time.monotonic() + _PULL_PROGRESS_S
            while self.transport.progress() and time.monotonic() < end_s:
                pass
        return True

    @property
    def _in_flight(self) -> int:
        entries = self.offloader.in_flight + self.pulls.in_flight if self._tiers is not None else 0
        return self.sender.in_flight + self.receiver.in_flight + entries

    @property
    def _is_awaited(self) -> bool:
        """Whether anything in flight is more than a save."""
        entries = self._tiers is not None and (self.offloader.is_awaited or self.pulls.in_flight)
        return bool(entries or self.sender.in_flight or self.receiver.in_flight)

    def _entry_arrived(self, arrival: Arrival) -> None:
        if self._tiers is None:
            self.transport.discard(arrival)
        else:
            self.pulls.receiver.arrived(arrival)

    def _drain(self) -> None:
        """Cancels what is in flight and waits until nothing is."""
        self.links.disconnect_all()
        if self._tiers is not None:
            self.offloader.close()
        deadline_s = time.monotonic() + _CLOSE_TIMEOUT_S
        while self._in_flight and time.monotonic() < deadline_s:
            self._advance()
        if self._tiers is not None:
            self._tiers.stop_waiting()  # again, because calls may have come; the next thread must not answer them

    def _close(self) -> None:
        try:
            self.transport.close()
            if self._tiers is not None:
                self.pulls.close()
            self.mover.close()
        finally:
            # ucxx's objects must be destroyed on the thread that made them.
            del self.links, self.sender, self.receiver, self.transport, self.mover
            if self._tiers is not None:
                del self.offloader, self.pulls
