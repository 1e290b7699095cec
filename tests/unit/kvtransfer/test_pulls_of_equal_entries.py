"""Two pulls of the same entries at once: each gets what is there, and a link is blamed only for its entries."""

from concurrent.futures import Future

import pytest

from baton.core.errors import DataLoss
from baton.core.kv_entries import EntryKey
from kvtransfer.records import EntryLink, PullJob
from tests.unit.kvtransfer.test_offload_storms import SEQUENCES, write
from tests.unit.kvtransfer.test_pull_storms import BLOCKS, Side, Way

KEYS = SEQUENCES[0]
ALL = len(KEYS)
FIRST, SECOND = 1 << 40, 2 << 40


class ReaderAndOwner:
    """A reader, and an owner that has the entries, with two links."""

    def __init__(self) -> None:
        self.reader, self.owner = (Side(places=20, has_store=False) for _ in range(2))
        write(self.owner.user, KEYS, BLOCKS)
        self.owner.world.run_until(self.owner.user.begin_save(KEYS, BLOCKS).done)
        for link in (FIRST, SECOND):
            Way(self.reader, self.owner).connect(link)

    def begin(self, link: int, keys: tuple[EntryKey, ...] = KEYS) -> int:
        future: Future[int] = Future()
        self.reader.pulls.receiver.begin(PullJob(self._number(link), keys), (EntryLink(link),), future)
        return future.result()

    def serve(self, link: int) -> None:
        self.owner.pulls.sender.serve(EntryLink(link), PullJob(self._number(link), KEYS), Future())
        self.run()

    def end(self, link: int) -> "Future[int]":
        future: Future[int] = Future()
        self.reader.pulls.receiver.end(self._number(link), ALL, 1.0, future)
        self.run()
        return future

    def _number(self, link: int) -> int:
        return link >> 40

    def run(self) -> None:
        for _ in range(100):
            self.owner.step()
            self.reader.step()


def test_a_pull_waits_for_the_entries_that_another_one_brings() -> None:
    nodes = ReaderAndOwner()
    assert (nodes.begin(FIRST), nodes.begin(SECOND)) == (ALL, ALL)
    nodes.serve(SECOND)  # it has no places, so what arrives is dropped
    second = nodes.end(SECOND)
    assert not second.done()
    nodes.serve(FIRST)
    assert second.result() == ALL
    assert nodes.end(FIRST).result() == ALL
    nodes.reader.check_nothing_is_left()


@pytest.mark.parametrize("ends_by", ["loss", "time"])
def test_what_another_pull_does_not_bring_is_no_fault_of_the_link(ends_by: str) -> None:
    nodes = ReaderAndOwner()
    assert (nodes.begin(FIRST), nodes.begin(SECOND)) == (ALL, ALL)
    nodes.serve(SECOND)
    second = nodes.end(SECOND)
    if ends_by == "loss":
        nodes.reader.pulls.lost(FIRST)
        nodes.reader.transport.disconnect(FIRST)
    else:
        nodes.reader.world.clock.now_s += 1.0
    nodes.run()
    assert second.result() == 0


def test_a_link_whose_entries_do_not_arrive_is_at_fault() -> None:
    nodes = ReaderAndOwner()
    assert nodes.begin(FIRST) == ALL
    ended = nodes.end(FIRST)
    assert not ended.done()
    nodes.reader.world.clock.now_s += 1.0
    nodes.run()
    assert isinstance(ended.exception(), DataLoss)
    nodes.reader.check_nothing_is_left()


def test_a_pulled_entry_that_has_left_host_memory_again_is_no_fault_of_the_link() -> None:
    nodes = ReaderAndOwner()
    assert nodes.begin(FIRST) == ALL
    nodes.serve(FIRST)
    nodes.reader.world.forget_host(KEYS[2:])
    assert nodes.end(FIRST).result() == 2
