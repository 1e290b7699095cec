"""Limits of clients hold for all processes of a gateway together."""

import os
from collections.abc import Iterator

import pytest

from baton.core.errors import Overloaded
from baton.security.limit_table import LimitTable
from baton.security.limits import Budget, Limits

WORKERS = 3


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tables() -> Iterator[list[LimitTable]]:
    """The parent's table, and the same memory as each worker has it."""
    parent, fd = LimitTable.create(WORKERS)
    yield [parent, *(LimitTable(WORKERS, row, fd) for row in range(WORKERS))]
    os.close(fd)


def budgets(tables: list[LimitTable], clock: Clock, limits: Limits, name: str = "ann") -> list[Budget]:
    """The client's budget in each worker."""
    return [Budget(limits, name, table=table, clock=clock) for table in tables[1:]]


def test_requests_at_any_worker_count_for_all(tables: list[LimitTable], clock: Clock) -> None:
    workers = budgets(tables, clock, Limits(requests_per_minute=6))
    for number in range(6):
        with workers[number % WORKERS].request():
            pass
    for worker in workers:
        with pytest.raises(Overloaded, match="6 requests per minute") as refused, worker.request():
            pass
        assert refused.value.retry_after_s == pytest.approx(10.0)
    clock.now_s += 10.1
    with workers[2].request():
        pass
    with pytest.raises(Overloaded), workers[0].request():
        pass


def test_tokens_at_any_worker_count_for_all(tables: list[LimitTable], clock: Clock) -> None:
    one, other, _ = budgets(tables, clock, Limits(tokens_per_minute=1000))
    with one.request(tokens=900) as charge:
        with pytest.raises(Overloaded), other.request(tokens=200):
            pass
        charge.has(100)
        one.spend(1500)
    with pytest.raises(Overloaded) as refused, other.request(tokens=1):
        pass
    assert refused.value.retry_after_s == pytest.approx(36.06)  # until 601 tokens have come


def test_a_worker_that_was_idle_for_long_does_not_count_what_others_used_long_ago(
    tables: list[LimitTable], clock: Clock
) -> None:
    one, other, _ = budgets(tables, clock, Limits(requests_per_minute=2))
    for _ in range(2):
        with one.request():
            pass
    clock.now_s += 3600
    for _ in range(2):
        with other.request():
            pass


def test_running_requests_of_all_workers_count_and_those_of_a_dead_worker_do_not(
    tables: list[LimitTable], clock: Clock
) -> None:
    one, other, _ = budgets(tables, clock, Limits(concurrent=3))
    with one.request(outputs=2):
        with other.request(), pytest.raises(Overloaded, match="3 requests at once"), other.request():
            pass
        tables[0].retire_row(0)  # by the parent, after a crash
        with other.request(outputs=3):
            pass


def test_clients_do_not_share_what_they_use(tables: list[LimitTable], clock: Clock) -> None:
    limits = Limits(requests_per_minute=1)
    for number in range(2000):
        with budgets(tables, clock, limits, f"client {number}")[number % WORKERS].request():
            pass
    with pytest.raises(Overloaded), budgets(tables, clock, limits, "client 7")[0].request():
        pass


def test_clients_that_used_nothing_lately_make_room_for_others(clock: Clock) -> None:
    table, limits = LimitTable(), Limits(requests_per_minute=1)
    for start in range(0, 100_000, 20_000):  # many more clients than entries
        for number in range(start, start + 2000):
            with Budget(limits, f"client {number}", table=table, clock=clock).request():
                pass
        clock.now_s += 61.0
    assert all(table.cells(f"client {number}", int(clock.now_s * 1e9)) is not None for number in range(1000))


@pytest.mark.parametrize("per_minute", [1e-9, 0.001, 7, 9, 601, 1e9, 1e18])
def test_a_full_allowance_can_be_used_whole_at_any_rate(per_minute: float, clock: Clock) -> None:
    budget = Budget(Limits(tokens_per_minute=per_minute), "ann", table=LimitTable(), clock=clock)
    whole = min(9, max(1, int(per_minute)))
    for _ in range(whole):
        with budget.request(tokens=1):
            budget.spend(1)
    budget.spend(1 << 40)
    budget.spend(1 << 40)
