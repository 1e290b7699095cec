"""All processes of a gateway see the same sums, even after one of them has died."""

import os

from baton.gateway.core.shared_counters import Count, SharedCounters


def test_every_process_sees_the_sum_of_all_rows() -> None:
    parent, fd = SharedCounters.create(2)
    workers = [SharedCounters(2, row, fd) for row in range(2)]
    os.close(fd)
    workers[0].add(Count.RUNNING, 3)
    workers[1].add(Count.RUNNING, 2)
    workers[1].add(Count.FINISHED, 1)
    for counters in (parent, *workers):
        assert counters.total(Count.RUNNING) == 5
        assert counters.total(Count.FINISHED) == 1
        assert counters.total(Count.REMOTE) == 0


def test_what_ran_in_a_process_that_is_gone_has_failed_and_its_counts_stay() -> None:
    parent, fd = SharedCounters.create(2)
    worker = SharedCounters(2, 1, fd)
    os.close(fd)
    worker.add(Count.RUNNING, 3)
    worker.add(Count.FINISHED, 4)
    parent.retire_row(1)
    assert [parent.total(count) for count in (Count.RUNNING, Count.FAILED, Count.FINISHED)] == [0, 3, 4]
