"""Memory of the host for entries, on a machine without a GPU."""

import logging
import threading
import time
from dataclasses import dataclass, field

import pytest

from baton.core.errors import ConfigError
from kvtransfer.movers.host_pages import FIRST_UNITS, HostPages
from tests.conformance.kv import DEADLINE_S

UNIT_BYTES = 8 << 20
UNITS = 40


@dataclass
class Locks:
    """Locks nothing, and remembers what it was asked for. All calls after the first wait while `gate` is closed.

    Attributes:
        most: calls that succeed; later ones say that they cannot lock.
    """

    most: int = 1 << 30
    gate: threading.Event = field(default_factory=threading.Event)
    calls: list[tuple[int, int]] = field(default_factory=list)
    locked: dict[int, int] = field(default_factory=dict)

    def lock(self, address: int, num_bytes: int) -> str:
        self.calls.append((address, num_bytes))
        if len(self.calls) > 1:
            assert self.gate.wait(DEADLINE_S)
        if len(self.calls) > self.most:
            return "there is a limit"
        self.locked[address] = num_bytes
        return ""

    def unlock(self, address: int) -> None:
        del self.locked[address]


def wait_until_usable(pages: HostPages, num_bytes: int) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while pages.usable_bytes < num_bytes:
        assert time.monotonic() < end_s
        time.sleep(0.001)


def test_pages_are_zeroed_and_outlive_their_maker_while_a_part_is_in_use() -> None:
    pages = HostPages(1 << 30)
    assert pages.tensor.numel() == 1 << 30
    assert pages.tensor.data_ptr() % 4096 == 0
    assert not pages.tensor[-(1 << 16) :].any()
    pages.tensor[-1] = 7
    part = pages.tensor[-2:]
    pages.close()
    del pages
    assert part.tolist() == [0, 7]


def test_more_than_the_machine_can_give_is_an_error_with_its_cure() -> None:
    with pytest.raises(ConfigError, match="smaller host cache") as error:
        HostPages(1 << 62)
    assert error.value.field == "host_cache_bytes"


def test_the_first_pages_are_locked_at_once_and_the_others_meanwhile_they_are_used() -> None:
    locks = Locks()
    pages = HostPages(UNITS * UNIT_BYTES, unit_bytes=UNIT_BYTES, locks=locks)
    assert pages.usable_bytes == FIRST_UNITS * UNIT_BYTES
    locks.gate.set()
    wait_until_usable(pages, UNITS * UNIT_BYTES)
    start = pages.tensor.data_ptr()
    for address, num_bytes in locks.calls:
        assert address == start, "one slab follows another"
        assert num_bytes % UNIT_BYTES == 0, "no unit is in two slabs"
        start += num_bytes
    assert start == pages.tensor.data_ptr() + UNITS * UNIT_BYTES
    assert sum(locks.locked.values()) == UNITS * UNIT_BYTES
    pages.close()
    assert not locks.locked


def test_units_larger_than_a_slab_are_locked_one_by_one() -> None:
    locks = Locks()
    locks.gate.set()
    pages = HostPages((FIRST_UNITS + 2) * (100 << 20), unit_bytes=100 << 20, locks=locks)
    wait_until_usable(pages, (FIRST_UNITS + 2) * (100 << 20))
    assert [num_bytes >> 20 for _, num_bytes in locks.calls] == [100 * FIRST_UNITS, 100, 100]
    pages.close()


def test_closing_does_not_wait_for_pages_that_are_not_locked_yet() -> None:
    locks = Locks()
    pages = HostPages(UNITS * UNIT_BYTES, unit_bytes=UNIT_BYTES, locks=locks)
    closing = threading.Thread(target=pages.close)
    closing.start()
    while not pages._closing.is_set():
        time.sleep(0.001)
    locks.gate.set()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    assert len(locks.calls) <= 2
    assert not locks.locked


def test_pages_that_cannot_be_locked_leave_the_others_usable_and_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    locks = Locks(most=2)
    locks.gate.set()
    with caplog.at_level(logging.WARNING):
        pages = HostPages(UNITS * UNIT_BYTES, unit_bytes=UNIT_BYTES, locks=locks)
        assert pages._thread is not None
        pages._thread.join(DEADLINE_S)
    assert pages.usable_bytes == sum(locks.locked.values()) == (FIRST_UNITS + 8) * UNIT_BYTES
    assert "192 of 320 MiB: there is a limit; choose a smaller host cache" in caplog.text
    pages.close()
    assert not locks.locked


def test_first_pages_that_cannot_be_locked_are_an_error_with_its_cure() -> None:
    with pytest.raises(ConfigError, match="there is a limit") as error:
        HostPages(UNITS * UNIT_BYTES, unit_bytes=UNIT_BYTES, locks=Locks(most=0))
    assert error.value.cure == "choose a smaller host cache"
