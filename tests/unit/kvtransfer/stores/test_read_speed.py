from kvtransfer.stores.read_speed import ReadSpeed


def reads(speed: ReadSpeed, count: int, *, each_s: float, at_s: float, side_by_side: int = 1) -> float:
    """That many reads, the first begun at that time. Returns when the last ended."""
    for number in range(0, count, side_by_side):
        begun_s = at_s + number * each_s
        for _ in range(side_by_side):
            speed.begun(begun_s)
        for done in range(side_by_side):
            speed.ended(begun_s + (done + 1) * each_s, is_found=True)
    return at_s + count * each_s


def test_nothing_is_known_after_a_few_reads() -> None:
    speed = ReadSpeed()
    assert speed.entry_s(reads(speed, 15, each_s=1.0, at_s=0.0)) is None
    assert reads(speed, 1, each_s=1.0, at_s=15.0) == 16.0
    assert speed.entry_s(16.0) == 1.0


def test_reads_next_to_each_other_share_their_time() -> None:
    speed = ReadSpeed()
    end_s = reads(speed, 32, each_s=0.25, at_s=10.0, side_by_side=4)
    assert speed.entry_s(end_s) == 0.25


def test_one_read_that_hangs_does_not_make_a_fast_store_slow() -> None:
    speed = ReadSpeed()
    end_s = reads(speed, 20, each_s=0.25, at_s=10.0)
    speed.begun(end_s)
    speed.ended(end_s + 60.0, is_found=True)
    assert speed.entry_s(end_s + 60.0) == 0.25


def test_time_without_reads_and_misses_do_not_count() -> None:
    speed = ReadSpeed()
    reads(speed, 8, each_s=1.0, at_s=0.0)
    speed.begun(50.0)
    speed.ended(59.0, is_found=False)
    end_s = reads(speed, 8, each_s=1.0, at_s=80.0)
    assert speed.entry_s(end_s) == 1.0


def test_old_reads_are_forgotten_so_that_a_slow_store_is_tried_again() -> None:
    speed = ReadSpeed()
    end_s = reads(speed, 16, each_s=1.0, at_s=0.0)
    assert speed.entry_s(end_s + 100.0) == 1.0
    assert speed.entry_s(end_s + 121.0) is None
