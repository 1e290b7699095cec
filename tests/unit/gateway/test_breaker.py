"""Circuit breakers of nodes, as lists of what happens to their requests."""

from baton.gateway.fleet.breaker import Breakers

NODE, OTHER = 11, 12


def broken(breakers: Breakers, now_s: float, *, errors: int = 3) -> Breakers:
    for _ in range(errors):
        breakers.failed(NODE, now_s)
    return breakers


def test_errors_in_a_row_open_the_breaker_of_that_node_alone() -> None:
    breakers = broken(Breakers(), 0.0, errors=2)
    breakers.failed(OTHER, 0.0)
    assert breakers.open(0.0) == frozenset()
    breakers.failed(NODE, 0.0)
    assert breakers.open(0.5) == {NODE}


def test_an_answer_between_errors_keeps_it_closed() -> None:
    breakers = broken(Breakers(), 0.0, errors=2)
    breakers.answered(NODE)
    assert broken(breakers, 0.0, errors=2).open(0.0) == frozenset()


def test_after_a_second_one_request_is_its_trial() -> None:
    breakers = broken(Breakers(), 0.0)
    assert breakers.open(1.0) == frozenset()
    breakers.chosen(NODE, 1.0)
    assert breakers.open(1.0) == {NODE}
    breakers.answered(NODE)
    assert breakers.open(1.0) == frozenset()


def test_a_failed_trial_doubles_the_time_up_to_half_a_minute() -> None:
    breakers, now_s, waits = broken(Breakers(), 0.0), 0.0, []
    for _ in range(7):
        opened_s = now_s
        while NODE in breakers.open(now_s):
            now_s += 0.5
        waits.append(now_s - opened_s)
        breakers.chosen(NODE, now_s)
        breakers.failed(NODE, now_s)
    assert waits == [1, 2, 4, 8, 16, 30, 30]


def test_errors_of_requests_sent_before_do_not_prolong_it() -> None:
    assert broken(broken(Breakers(), 0.0), 0.9).open(1.0) == frozenset()


def test_a_trial_without_an_end_is_followed_by_another_one() -> None:
    breakers = broken(Breakers(), 0.0)
    breakers.chosen(NODE, 1.0)
    assert breakers.open(1.9) == {NODE}
    assert breakers.open(2.0) == frozenset()


def test_a_node_that_is_gone_is_forgotten() -> None:
    breakers = broken(Breakers(), 0.0)
    breakers.forget(NODE)
    assert breakers.open(0.0) == frozenset()
