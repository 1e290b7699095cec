"""How long the transfer thread sleeps: briefly for what somebody waits for, longer for saves."""

from kvtransfer.naps import Naps


def test_the_thread_naps_longer_for_saves_than_for_what_somebody_waits_for() -> None:
    naps = Naps(on_gpu=False)
    awaited_s = naps.next_s(0.0, is_awaited=True, is_saving=True)
    saving_s = naps.next_s(1.0, is_awaited=False, is_saving=True)
    assert awaited_s is not None
    assert saving_s is not None
    assert 0 < awaited_s < saving_s / 10


def test_the_thread_waits_for_an_event_while_a_gpu_copies_saves() -> None:
    naps = Naps(on_gpu=True)
    assert naps.next_s(0.0, is_awaited=False, is_saving=True) is not None
    assert naps.next_s(1.0, is_awaited=False, is_saving=True) is None


def test_naps_grow_with_the_time_since_the_last_event_to_a_limit() -> None:
    naps = Naps(on_gpu=True)
    lengths = [naps.next_s(quiet_s, is_awaited=True, is_saving=False) or 0.0 for quiet_s in (0.0, 1e-4, 1e-3, 1.0, 9.0)]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1] == lengths[-2]


def test_a_thread_with_nothing_in_flight_waits_for_an_event_after_a_while() -> None:
    naps = Naps(on_gpu=True)
    assert naps.next_s(0.0, is_awaited=False, is_saving=False) is not None
    assert naps.next_s(1.0, is_awaited=False, is_saving=False) is None
