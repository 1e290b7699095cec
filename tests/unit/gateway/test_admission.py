"""Which requests run, wait, or are refused, one decision at a time."""

from dataclasses import replace
from itertools import count

import pytest

from baton.core.errors import Overloaded
from baton.gateway.core.shared_counters import Count
from baton.gateway.serving.admission import Admission
from baton.gateway.serving.admission_pace import AdmissionPace, AdmissionRequest, Estimate, StandingQueue, StartRate
from baton.gateway.serving.node_capacity import ClusterCapacity, DecodeCapacity

FREE = ClusterCapacity((DecodeCapacity(load=10, most=20, most_shared=16, slots=10_000),), step_s=0.01)
FULL = replace(FREE, decodes=(DecodeCapacity(load=20, most=20, most_shared=16, slots=10_000),))
_keys = count(1)


def asked(
    client: str = "a", *, now_s: float = 0.0, left_s: float | None = None, **given: int | float
) -> AdmissionRequest:
    deadline_s = None if left_s is None else now_s + left_s
    values: dict[str, int | float] = {"prompt_tokens": 80, "output_tokens": 90, "certain_tokens": 90, **given}
    return AdmissionRequest(next(_keys), client, arrived_s=now_s, deadline_s=deadline_s, **values)  # type: ignore[arg-type]


def make(*, most: int = 100, queue_s: float = 10.0) -> Admission:
    return Admission(most=most, queue_s=queue_s)


def starting(admission: Admission, *, per_s: float) -> None:
    """For two seconds so many requests have started each second, while others waited."""
    admission._rate.waits(0.0)
    for number in range(1, int(2 * per_s) + 1):
        admission._rate.started(100.0, number / per_s)


# ---- start or wait


def test_a_request_starts_where_there_is_room_and_waits_where_there_is_none() -> None:
    admission = make()
    assert admission.offer(asked(), FREE, 0.0)
    first, second = asked(), asked()
    assert not admission.offer(first, FULL, 0.0)
    assert not admission.offer(second, FREE, 0.0), "it does not overtake one that waits"
    assert admission.take(FULL, 0.1) is None
    assert [admission.take(FREE, 0.1), admission.take(FREE, 0.1), admission.take(FREE, 0.1)] == [
        first.key,
        second.key,
        None,
    ]


@pytest.mark.parametrize(
    "room",
    [
        replace(FREE, prefill_wait_s=0.4),
        replace(FREE, decodes=(DecodeCapacity(10, 20, 16, slots=80),)),
        replace(FREE, decodes=(DecodeCapacity(20, 20, 16, 10_000),)),
    ],
)
def test_prompts_that_wait_missing_blocks_and_missing_seats_hold_a_request_back(room: ClusterCapacity) -> None:
    assert not make().offer(asked(), room, 0.0)


def test_an_idle_node_and_nodes_that_are_not_known_take_any_request() -> None:
    assert make().offer(asked(), ClusterCapacity((DecodeCapacity(0, 20, 16, slots=1),), prefill_wait_s=9.0), 0.0)
    assert make().offer(asked(), ClusterCapacity(), 0.0)


def test_a_request_with_more_outputs_than_seats_is_served() -> None:
    assert make().offer(asked(outputs=128), FREE, 0.0)


def test_a_request_whose_client_has_left_waits_no_longer() -> None:
    admission = make()
    gone = asked()
    admission.offer(gone, FULL, 0.0)
    admission.withdraw(gone.key, 0.1)
    admission.withdraw(gone.key, 0.1)
    assert (admission.num_waiting, admission.take(FREE, 0.2)) == (0, None)


# ---- deadlines


def test_a_request_that_cannot_be_finished_in_time_is_refused_at_once_with_a_hint() -> None:
    with pytest.raises(Overloaded, match=r"it would take 0\.9 s and has 0\.8 s") as refused:
        make().offer(asked(left_s=0.8), FULL, 0.0)
    assert refused.value.retry_after_s == pytest.approx(0.1, abs=0.01)
    with pytest.raises(Overloaded):
        make().offer(asked(left_s=0.8), FREE, 0.0)
    assert make().offer(asked(left_s=1.4), FREE, 0.0)


def test_a_request_whose_deadline_has_passed_gets_the_error_of_that() -> None:
    assert make().offer(asked(left_s=0.0), FULL, 0.0)


def test_measured_times_count() -> None:
    admission = make()
    assert admission.offer(asked(left_s=2.0), FREE, 0.0)
    admission.pace.first_token(0.5, 0, FREE, 0.0)
    admission.pace.progressed(0.02, FREE, 0.0)  # twice as long as predicted
    with pytest.raises(Overloaded, match=r"it would take 2\.3 s"):
        admission.offer(asked(left_s=2.0), FULL, 0.0)
    assert not admission.offer(asked(left_s=4.0), FULL, 0.0)


def test_old_measurements_keep_nobody_out_for_ever() -> None:
    admission = make()
    admission.pace.first_token(60.0, 0, FREE, 0.0)
    with pytest.raises(Overloaded):
        admission.offer(asked(left_s=5.0), FREE, 1.0)
    assert admission.offer(asked(now_s=30.0, left_s=5.0), FREE, 30.0)


def test_a_cluster_with_little_to_do_tries_what_looks_too_slow() -> None:
    admission = make()
    admission.pace.first_token(60.0, 0, FREE, 0.0)
    light = replace(FREE, decodes=(DecodeCapacity(1, 20, 16, 10_000),))
    assert admission.offer(asked(left_s=5.0), light, 1.0)


def test_the_predicted_wait_may_take_only_a_part_of_what_the_service_leaves() -> None:
    admission = make()
    starting(admission, per_s=10.0)
    for _ in range(5):
        admission.offer(asked(now_s=2.0), FULL, 2.0)
    with pytest.raises(Overloaded, match=r"expected wait 0\.5\d* s exceeds the allowed 0\.088 s") as refused:
        admission.offer(asked(now_s=2.0, left_s=2.0), FULL, 2.0)
    assert admission.counts[Count.REFUSED_DEADLINE] == 1
    assert refused.value.retry_after_s is not None
    assert not admission.offer(asked(now_s=2.0, left_s=9.0), FULL, 2.0)


def test_what_can_no_longer_be_in_time_is_given_up_before_it_costs() -> None:
    admission = make()
    short, long, none = asked(left_s=2.0), asked(left_s=4.0), asked()
    for each in (short, long, none):
        admission.offer(each, FULL, 0.0)
    assert admission.shed(FULL, 1.0) == []
    (refused,) = admission.shed(FULL, 1.2)
    assert (refused.key, refused.reason) == (short.key, Count.SHED)
    assert refused.error.retry_after_s is not None
    assert admission.num_waiting == 2
    assert [each.key for each in admission.shed(FULL, 10.0)] == [long.key, none.key]
    assert admission.counts == {Count.SHED: 2, Count.REFUSED_QUEUE: 1}


def test_a_first_token_that_comes_too_late_is_refused_where_that_is_asked_for() -> None:
    admission = make()
    admission.pace.first_token(0.5, 0, FREE, 0.0)
    with pytest.raises(Overloaded, match="after it is due"):
        admission.offer(asked(first_due_s=0.4), FULL, 0.0)
    waiting = asked(first_due_s=1.0)
    assert not admission.offer(waiting, FULL, 0.0)
    assert [each.key for each in admission.shed(FULL, 0.6)] == [waiting.key]


def test_prompts_that_wait_on_the_nodes_delay_the_first_token() -> None:
    room = replace(FULL, prefill_wait_s=0.5)
    with pytest.raises(Overloaded, match="after it is due"):
        make().offer(asked(first_due_s=0.4), room, 0.0)
    assert not make().offer(asked(first_due_s=0.6), room, 0.0)


# ---- without deadlines


def test_the_queue_is_as_long_as_its_delay_allows() -> None:
    admission = make(queue_s=1.99)
    starting(admission, per_s=10.0)
    for _ in range(20):
        assert not admission.offer(asked(now_s=2.0), FULL, 2.0)
    with pytest.raises(Overloaded, match=r"expected wait 2\S* s exceeds the allowed 1\.99 s") as refused:
        admission.offer(asked(now_s=2.0), FULL, 2.0)
    assert refused.value.retry_after_s is not None
    assert not admission.offer(asked("other", now_s=2.0), FULL, 2.0)


def test_without_a_queue_a_request_runs_at_once_or_not_at_all() -> None:
    admission = make(queue_s=0.0)
    assert admission.offer(asked(), FREE, 0.0)
    with pytest.raises(Overloaded):
        admission.offer(asked(), FULL, 0.0)


def test_a_queue_stands_when_the_shortest_wait_of_an_interval_is_too_long() -> None:
    queue = StandingQueue(target_s=1.0, interval_s=2.0)
    queue.look(0.0)
    for at_s in (0.5, 1.0, 1.5):
        queue.look(at_s, waited_s=1.2)
    assert not queue.stands
    queue.look(2.0)
    assert queue.stands
    queue.look(3.0, waited_s=0.8)
    queue.look(4.0)
    assert queue.stands, "it hovers at the target"
    queue.look(5.0, waited_s=0.4)
    queue.look(6.0)
    assert not queue.stands
    queue.look(7.0, waited_s=3.0)
    queue.look(7.5, waited_s=0.0)
    assert not queue.stands


# ---- limits and clients


def test_over_the_limit_the_largest_client_makes_way() -> None:
    admission = make(most=10)
    for _ in range(10):
        admission.enter("heavy", 1, 0, 0.0)
    waiting = [asked("heavy") for _ in range(4)]
    for each in waiting:
        admission.offer(each, FULL, 0.0)
    with pytest.raises(Overloaded, match="10 requests are running already, of at most 10") as refused:
        admission.enter("heavy", 1, 10, 0.0)
    assert refused.value.retry_after_s is not None
    with pytest.raises(Overloaded):
        admission.enter("medium", 3, 12, 0.0)
    assert admission.num_waiting == 4, "nobody makes way if that is not enough"
    evicted = admission.enter("medium", 3, 11, 0.0)
    assert [each.key for each in evicted] == [each.key for each in reversed(waiting)]
    assert {each.reason for each in evicted} == {Count.REFUSED_FULL}


def test_silent_streams_do_not_refuse_a_light_client() -> None:
    admission = make(most=1024)
    here = 0
    for _ in range(3000):
        try:
            admission.enter("idle", 1, here, 0.0)
        except Overloaded:
            continue
        here += 1
    assert here == 1024
    for _ in range(5):
        admission.enter("light", 1, here, 1.0)
        here += 1
    for _ in range(5):
        admission.leave("light", 1)
    for number in range(1000):
        try:
            admission.enter(f"greedy-{number % 2}", 1, here, 1.0)
        except Overloaded:
            continue
        here += 1
    assert 1100 < here <= 1280


def test_next_to_a_light_client_a_heavy_one_gets_fewer_streams_and_the_light_one_does_not_wait() -> None:
    admission = make()
    busy = replace(FREE, decodes=(DecodeCapacity(17, 20, 16, 10_000),))
    for _ in range(50):
        admission.enter("heavy", 1, 0, 0.0)
    assert admission.offer(asked("heavy"), busy, 0.0), "alone it may use all seats"
    admission.enter("light", 1, 0, 1.0)
    assert not admission.offer(asked("heavy"), busy, 1.0)
    light = asked("light")
    assert admission.offer(light, busy, 1.0), "it overtakes what waits only for its sake"
    full = replace(FREE, decodes=(DecodeCapacity(20, 20, 16, 10_000),))
    second = asked("light")
    assert not admission.offer(second, full, 1.0)
    assert admission.take(full, 1.0) is None
    assert admission.take(busy, 1.0) == second.key


def test_an_early_check_refuses_what_an_offer_would_and_nothing_else() -> None:
    admission = make()
    admission.check_early(asked(), FREE, 0.0)
    with pytest.raises(Overloaded, match=r"it would take 0\.9 s"):
        admission.check_early(asked(left_s=0.8), FULL, 0.0)
    admission.check_early(asked(left_s=0.0), FULL, 0.0)
    starting(admission, per_s=0.5)
    admission.offer(asked("heavy", now_s=2.0), FULL, 2.0)
    for _ in range(20):
        admission.enter("heavy", 1, 0, 2.0)
    admission.enter("light", 1, 0, 2.0)
    late = asked("light", now_s=2.0, first_due_s=3.0)
    admission.check_early(late, FREE, 2.0)
    with pytest.raises(Overloaded, match="after it is due"):
        admission.check_early(replace(late, client="heavy"), FREE, 2.0)


def test_a_burst_next_to_a_light_client_is_bounded_from_its_beginning() -> None:
    admission = make()
    admission.enter("light", 1, 0, 0.0)
    admission.leave("light", 1)
    started = 0
    for _ in range(50):
        admission.enter("heavy", 1, 0, 0.01)
        node = DecodeCapacity(load=started, most=80, most_shared=72, slots=10_000)
        started += admission.offer(asked("heavy", now_s=0.01), replace(FREE, decodes=(node,)), 0.01)
    assert started == 16


def test_a_request_that_waited_pays_for_the_tokens_that_it_got() -> None:
    admission = make()
    a, b, a2, b2 = asked("a"), asked("b"), asked("a"), asked("b")
    for each in (a, b, a2, b2):
        admission.offer(each, FULL, 0.0)
    assert [admission.take(FREE, 0.0), admission.take(FREE, 0.0)] == [a.key, b.key]
    admission.settle(b, 1)
    admission.settle(a, 90)
    admission.settle(a, 90)  # only once
    assert admission.take(FREE, 0.0) == b2.key


# ---- measuring


def test_expected_tokens_follow_what_requests_of_that_size_had() -> None:
    pace, chat = AdmissionPace(), asked(output_tokens=4096, certain_tokens=0)
    assert pace.expected_tokens(chat) == 200
    for _ in range(200):
        pace.ended(50, 4096, whole=True)
    assert 40 <= pace.expected_tokens(chat) <= 60
    pace.ended(900, 4096, whole=False)
    assert pace.expected_tokens(chat) > 50
    assert pace.expected_tokens(asked(output_tokens=16, certain_tokens=0)) == 16
    assert pace.expected_tokens(asked(output_tokens=4096, certain_tokens=4096)) == 4096


def test_running_streams_show_that_the_nodes_have_become_slow() -> None:
    pace, request = AdmissionPace(), asked(prompt_tokens=0, output_tokens=100, certain_tokens=100)
    assert pace.service_s(request, FREE, 0.0) == pytest.approx(100 * 0.01)
    for number in range(8):
        pace.progressed(0.05, FREE, 0.25 * number)
    assert pace.service_s(request, FREE, 2.0) == pytest.approx(100 * 0.05, rel=0.05)
    assert pace.service_s(request, FREE, 30.0) == pytest.approx(100 * 0.01), "nothing runs any more"


def test_the_rate_counts_only_the_time_in_which_requests_wait() -> None:
    rate = StartRate()
    assert rate.at(0.0, 0.25) is None
    rate.waits(0.0)
    for number in range(1, 21):
        rate.started(5.0, number / 10)
    before = rate.at(2.0, 0.25)
    assert before == pytest.approx(50.0, rel=0.1)
    rate.waits(2.0, waits=False)
    assert rate.at(500.0, 0.25) == before
    rate.waits(500.0)
    after = rate.at(510.0, 0.25)
    assert after is not None
    assert after < 5.0, "nothing starts any more"


def test_an_estimate_fades_while_nothing_is_measured() -> None:
    estimate = Estimate()
    assert estimate.at(0.0) == 0.0
    estimate.observe(8.0, 0.0)
    assert estimate.at(3.0) == 8.0
    assert estimate.at(6.0) == pytest.approx(4.0)
    estimate.observe(2.0, 100.0)
    assert estimate.at(100.0) == pytest.approx(5.0)


def test_long_prompts_do_not_make_short_ones_look_slow() -> None:
    room = replace(FREE, prompt_token_s=0.001)
    pace = AdmissionPace()
    pace.first_token(20.1, 20_000, room, 0.0)
    short, long = asked(prompt_tokens=100), asked(prompt_tokens=20_000)
    assert pace.service_s(short, room, 0.0) == pytest.approx(0.1 + 0.1 + 0.9)
    assert pace.service_s(long, room, 0.0) == pytest.approx(0.1 + 20.0 + 0.9)


def test_a_deadline_that_is_too_tight_holds_up_nobody() -> None:
    """There is room, but the first request would take more than a safe part of its time: it makes way."""
    admission = Admission(most=1000, queue_s=10.0)
    busy = ClusterCapacity((DecodeCapacity(load=200, most=640, most_shared=640, slots=1 << 30),), step_s=0.009)
    tight = AdmissionRequest(1, "x", 100, 4000, 4000, 0.0, deadline_s=0.009 * 4000 / 0.8)
    patient = AdmissionRequest(2, "y", 100, 100, 100, 0.0)
    assert not admission.offer(tight, busy, 0.0)
    assert not admission.offer(patient, busy, 0.0)
    assert admission.take(busy, 0.01) is None
    assert [each.key for each in admission.shed(busy, 0.02)] == [1]
    assert admission.take(busy, 0.02) == 2


def test_a_burst_before_anything_was_started_is_not_refused() -> None:
    admission = Admission(most=1000, queue_s=10.0)
    full = ClusterCapacity((DecodeCapacity(load=64, most=64, most_shared=64, slots=1 << 30),))
    for number in range(20):
        assert not admission.offer(AdmissionRequest(number, "x", 100, 100, 100, 0.1 * number), full, 0.1 * number)
