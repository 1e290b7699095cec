"""The calls to a store: when it counts as stuck, so that requests do not wait for it."""

from concurrent.futures import Future
from threading import Semaphore

from kvtransfer.offload_queue import STUCK_AFTER_S, StoreQueue
from tests.conformance.kv import DEADLINE_S
from tests.unit.kvtransfer.offloading import Clock, MemoryStore, keys_of


class SteppedStore(MemoryStore):
    """Each call begins, and ends when the test lets one end."""

    def __post_init__(self) -> None:
        self.begun, self.may_end = Semaphore(0), Semaphore(0)

    def _call(self, verb: str) -> None:
        self.begun.release()
        assert self.may_end.acquire(timeout=DEADLINE_S)


def test_writes_that_wait_for_their_turn_do_not_keep_a_working_store_from_being_read() -> None:
    store, clock = SteppedStore(), Clock()
    calls = StoreQueue(store, clock=clock)
    writes = [calls.put(key, memoryview(b"")) for key in keys_of(6)]
    for write in writes:  # each is fast enough, all together are not
        assert store.begun.acquire(timeout=DEADLINE_S)
        clock.now_s += STUCK_AFTER_S / 2
        assert not calls.is_stuck
        store.may_end.release()
        assert write.result(DEADLINE_S)
    assert calls.close(timeout_s=DEADLINE_S)


def test_one_write_that_hangs_and_reads_that_wait_make_a_store_stuck() -> None:
    for begin in (_write, _reads):
        store, clock = SteppedStore(), Clock()
        calls = StoreQueue(store, clock=clock)
        futures = begin(calls)
        assert store.begun.acquire(timeout=DEADLINE_S)
        assert not calls.is_stuck
        clock.now_s += STUCK_AFTER_S * 1.5
        assert calls.is_stuck
        store.may_end.release(len(futures))
        for future in futures:
            future.result(DEADLINE_S)
        assert not calls.is_stuck
        assert calls.close(timeout_s=DEADLINE_S)


def _write(calls: StoreQueue) -> list[Future[bool]]:
    return [calls.put(keys_of(1)[0], memoryview(b""))]


def _reads(calls: StoreQueue) -> list[Future[int]]:
    return [calls.has((key,)) for key in keys_of(9)]
