"""How busy each process of a gateway is, and what it could send."""

import os

import pytest

from baton.gateway.core.shared_counters import SharedCounters
from baton.gateway.observe.load import WINDOW_STEPS, LoadMeter, WorkerLoad, worker_loads

TOKENS = "baton_generation_tokens_total"


class Times:
    """The time, and the CPU time of a loop that is busy for a share of it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.loop_s = 0.0

    def passes(self, seconds: float, *, busy_share: float) -> None:
        self.now_s += seconds
        self.loop_s += seconds * busy_share


def meter(counters: SharedCounters, times: Times) -> LoadMeter:
    return LoadMeter(counters, clock=lambda: times.now_s, loop_clock=lambda: times.loop_s)


def test_every_process_reads_the_load_of_all() -> None:
    parent, fd = SharedCounters.create(2)
    workers = [SharedCounters(2, row, fd) for row in range(2)]
    for row, counters in enumerate(workers):
        times, tokens = Times(), counters.tally.counter(TOKENS)
        measured = meter(counters, times)
        measured.read()
        tokens.add(8000 * (row + 1))
        times.passes(2.0, busy_share=0.4 * (row + 1))
        measured.read()
    expected = [WorkerLoad(0.4, 4000), WorkerLoad(0.8, 8000)]
    for counters in (parent, *workers):
        assert worker_loads(counters) == expected
    assert [load.limit_tokens_per_s for load in expected] == [10_000, 10_000]
    parent.retire_row(0)
    assert worker_loads(workers[1]) == [WorkerLoad(0.0, 0), WorkerLoad(0.8, 8000)]
    os.close(fd)


def test_a_load_is_of_the_last_steps() -> None:
    counters, times = SharedCounters(), Times()
    measured = meter(counters, times)
    for busy_share in (*[1.0] * WINDOW_STEPS, *[0.0] * (WINDOW_STEPS + 1)):
        measured.read()
        times.passes(2.0, busy_share=busy_share)
    measured.read()
    assert worker_loads(counters) == [WorkerLoad(0.0, 0)]


@pytest.mark.parametrize("load", [WorkerLoad(0.0, 0), WorkerLoad(0.9, 0), WorkerLoad(0.01, 90)])
def test_a_process_without_enough_work_says_nothing_about_its_limit(load: WorkerLoad) -> None:
    assert load.limit_tokens_per_s is None
