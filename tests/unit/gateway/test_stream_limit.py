"""How many streams run next to a client with few requests, by what streams were measured to take."""

from baton.gateway.serving.admission_pace import StreamBound
from baton.gateway.serving.node_capacity import ClusterCapacity, DecodeCapacity


def room(load: int) -> ClusterCapacity:
    node = DecodeCapacity(load=load, most=80, most_shared=66, slots=10_000, seats=64)
    return ClusterCapacity((node,), alone_s=0.005)


def settled(bound: StreamBound, token_s: float, load: int) -> float:
    """The bound after each of `load` streams got a token every `token_s` for ten seconds."""
    for _ in range(40):
        bound.measured(token_s, room(load), spares=True)
    return bound.most(room(load))


def after_one_alone(token_s: float) -> StreamBound:
    bound = StreamBound()
    for _ in range(2):
        bound.measured(token_s, room(1), spares=False)
    return bound


def test_before_anything_is_measured_few_streams_start() -> None:
    assert StreamBound().most(room(0)) == 16


def test_more_streams_start_while_all_are_fast_and_fewer_once_they_are_slow() -> None:
    bound = after_one_alone(0.01)
    assert settled(bound, 0.012, 66) == 66
    assert settled(bound, 0.1, 66) == 8
    assert settled(bound, 0.012, 66) == 66


def test_streams_that_are_twice_as_slow_as_one_alone_stay_as_they_are() -> None:
    bound = after_one_alone(0.01)
    for _ in range(20):
        bound.measured(0.02, room(round(bound.most(room(0)))), spares=True)
    assert bound.most(room(0)) == 16


def test_a_bound_that_nobody_reaches_does_not_grow() -> None:
    bound = StreamBound()
    assert settled(bound, 0.006, 4) == 16


def test_without_a_stream_that_ran_alone_costs_say_what_it_would_take() -> None:
    assert settled(StreamBound(), 0.02, 30) == 8
    assert settled(StreamBound(), 0.006, 66) == 66


def test_without_a_light_client_the_bound_is_forgotten() -> None:
    bound = StreamBound()
    settled(bound, 0.1, 66)
    bound.measured(0.1, room(66), spares=False)
    assert bound.most(room(66)) == 16
