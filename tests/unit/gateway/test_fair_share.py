"""A queue that gives each client the same share of the work, whatever the others send."""

from collections import Counter
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.gateway.serving.fair_share import FairShare, Waiting


def queue_of(*waiting: Waiting) -> FairShare:
    queue = FairShare()
    for each in waiting:
        queue.push(each)
    return queue


def served(queue: FairShare, number: int = 1000) -> list[int]:
    keys: list[int] = []
    while len(keys) < number and (first := queue.first) is not None:
        queue.serve(first.key)
        keys.append(first.key)
    return keys


def test_clients_take_turns_by_cost() -> None:
    large = [Waiting(key, "large", 30.0) for key in range(3)]
    small = [Waiting(10 + key, "small", 10.0) for key in range(6)]
    assert served(queue_of(*large, *small)) == [0, 10, 11, 12, 1, 13, 14, 15, 2]


def test_a_light_client_waits_for_one_request_of_a_heavy_one_at_most() -> None:
    queue = queue_of(*(Waiting(key, "heavy", 5.0) for key in range(150)))
    served(queue, 40)
    queue.push(Waiting(1000, "light", 5.0))
    assert 1000 in served(queue, 2)


def test_a_client_that_pauses_saves_nothing_up() -> None:
    queue = queue_of(Waiting(0, "a", 1.0), *(Waiting(10 + key, "b", 1.0) for key in range(100)))
    served(queue, 50)
    for key in range(20, 30):
        queue.push(Waiting(1000 + key, "a", 1.0))
    assert Counter(key >= 1000 for key in served(queue, 10)) == {True: 5, False: 5}


def test_an_empty_queue_forgets_what_clients_got() -> None:
    queue = queue_of(Waiting(0, "a", 100.0))
    served(queue)
    queue.charge("a", 500.0)
    queue.push(Waiting(1, "b", 1.0))
    served(queue)
    for key, client in ((2, "a"), (3, "b"), (4, "a"), (5, "b")):
        queue.push(Waiting(key, client, 1.0))
    assert served(queue, 2) in ([2, 3], [3, 2])


def test_a_cost_that_turns_out_lower_is_given_back() -> None:
    queue = queue_of(
        *(Waiting(key, "a", 10.0) for key in range(3)), *(Waiting(10 + key, "b", 10.0) for key in range(3))
    )
    assert served(queue, 2) == [0, 10]
    queue.charge("b", -9.0)
    assert served(queue, 2) == [11, 1]


def test_a_better_priority_lifts_a_request_over_its_own_clients_only() -> None:
    queue = queue_of(Waiting(0, "a", 1.0), Waiting(1, "b", 1.0), Waiting(2, "b", 1.0, priority=-5))
    assert served(queue) == [0, 2, 1]


def test_a_worse_priority_goes_after_all_clients() -> None:
    queue = queue_of(Waiting(0, "a", 1.0, priority=1), Waiting(1, "b", 9.0), Waiting(2, "b", 9.0))
    assert served(queue) == [1, 2, 0]


def test_the_largest_client_loses_its_newest_request() -> None:
    queue = queue_of(
        Waiting(0, "a", 5.0), Waiting(1, "b", 3.0), Waiting(2, "b", 3.0), Waiting(3, "b", 3.0, priority=-1)
    )
    assert [each.key for each in queue.newest_of_largest()] == [2, 1, 3]
    queue.remove(2)
    queue.remove(2)
    assert queue.num_waiting("b") == 2
    assert FairShare().newest_of_largest() == []


def test_the_cost_before_a_newcomer_is_its_own_and_the_others_share() -> None:
    queue = queue_of(*(Waiting(key, "heavy", 10.0) for key in range(20)))
    assert queue.cost_before("heavy", 0) == 200.0
    assert queue.cost_before("heavy", -1) == 0.0
    assert queue.cost_before("light", 0) == 10.0
    assert queue.cost_before("light", 1) == 200.0
    queue.push(Waiting(50, "light", 15.0))
    assert queue.cost_before("light", 0) == 15.0 + 20.0


def test_clients_without_debt_are_forgotten() -> None:
    queue = FairShare()
    queue.push(Waiting(-1, "waits", 1.0))
    for key in range(1500):
        queue.push(Waiting(key, f"client-{key}", 1.0))
        queue.serve(key)
    assert len(queue._clocks.keys() - queue._active.keys()) <= 1024
    assert list(queue._active) == ["waits"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 40), st.integers(-1, 2)), max_size=30),
    st.sampled_from("abcde"),
    st.integers(-1, 2),
)
def test_the_cost_before_is_what_is_then_served_before(
    pushes: list[tuple[str, int, int]], name: str, priority: int
) -> None:
    """Up to a tie of clocks, in which either may go first."""
    queue = FairShare()
    for key, (client, cost, rank) in enumerate(pushes):
        queue.push(Waiting(key, client, float(cost), rank))
        queue.cost_before("e", 0)
    predicted = queue.cost_before(name, priority)
    assert queue.cost_before(name, priority) == predicted
    queue.push(Waiting(1000, name, 1.0, priority))
    before = served(queue, 1000)
    costs = sum(pushes[key][1] for key in before[: before.index(1000)])
    ties = {client: max((cost for each, cost, _ in pushes if each == client), default=0) for client in "abcd"}
    assert abs(predicted - costs) <= sum(ties.values())


PUSHES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40), st.integers(-1, 1)), min_size=1, max_size=60)


@settings(max_examples=60, deadline=None)
@given(PUSHES, st.lists(st.booleans(), max_size=120))
def test_every_request_is_served_once_and_in_order_of_its_client(
    pushes: list[tuple[str, int, int]], turns: list[bool]
) -> None:
    queue, keys, order = FairShare(), count(), list[Waiting]()
    rest = iter(pushes)
    for push in [*turns, *[True] * len(pushes)]:
        if not push and (first := queue.first) is not None:
            queue.serve(first.key)
            order.append(first)
        elif push and (pushed := next(rest, None)) is not None:
            queue.push(Waiting(next(keys), pushed[0], float(pushed[1]), pushed[2]))
    while (first := queue.first) is not None:
        queue.serve(first.key)
        order.append(first)
    assert sorted(each.key for each in order) == list(range(len(pushes)))
    for client in "abc":
        for priority in (-1, 0, 1):
            own = [each.key for each in order if each.client == client and each.priority == priority]
            assert own == sorted(own)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=30), st.lists(st.integers(1, 40), min_size=2, max_size=30))
def test_two_clients_that_wait_differ_by_one_request_each_at_most(first: list[int], second: list[int]) -> None:
    queue = FairShare()
    for number, (client, costs) in enumerate((("a", first), ("b", second))):
        for place, cost in enumerate(costs):
            queue.push(Waiting(1000 * number + place, client, float(cost)))
    got = {"a": 0.0, "b": 0.0}
    while queue.num_waiting("a") and queue.num_waiting("b"):
        now = queue.first
        assert now is not None
        queue.serve(now.key)
        got[now.client] += now.cost
        assert abs(got["a"] - got["b"]) <= max(first) + max(second)
