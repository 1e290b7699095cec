"""The first token of a hand-over waits at the gateway until the second one can follow it without a long gap."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.core.errors import DataLoss, DeadlineExceeded
from baton.core.types import LocalPolicy, Objective, Slo
from baton.gateway.core.events import ClientCancelled, PrefillReplied, SessionLost, TimePassed, TokensCame
from baton.gateway.request.commands import Command, Finish, Respond
from baton.protos.internal.v1 import decode_pb2
from baton.protos.v1 import common_pb2
from tests.unit.gateway.fleets import request
from tests.unit.gateway.held_start import CAME_S, GAP_S, GONE, called, held, learned_s, taught, tokens_of
from tests.unit.gateway.served import (
    LENGTH,
    SCHEDULED,
    SENT,
    Served,
    accepted,
    failed,
    first_token,
    hand_over_failed,
    of,
    reserved,
    token,
)

# ---- the wait


def test_the_first_token_waits_for_the_part_of_the_delay_that_is_too_long_for_a_gap() -> None:
    served = held()
    assert served.machine.deadline_s == pytest.approx(CAME_S + learned_s(served) - GAP_S)
    until_s = learned_s(served) - GAP_S
    assert served.handle(TimePassed(), after_s=until_s / 2) == []
    assert tokens_of(served.handle(TimePassed(), after_s=until_s / 2)) == [[100]]
    assert served.machine.deadline_s is not None
    assert served.machine.deadline_s > 1.0
    assert tokens_of(served.decode(decode_pb2.Admitted(), token(1), after_s=GAP_S)) == [[101]]


def test_a_timer_that_fires_up_to_a_millisecond_early_ends_the_wait() -> None:
    served = held()
    assert served.machine.deadline_s is not None
    early_s = served.machine.deadline_s - 0.0009 - served.now_s
    assert tokens_of(served.handle(TimePassed(), after_s=early_s)) == [[100]]


def test_the_hand_over_goes_on_meanwhile() -> None:
    served = held()
    assert served.prefill(SENT) == []
    assert served.decode(decode_pb2.Admitted()) == []
    assert served.prefill_ended(None) == []
    assert served.machine.completion_tokens == 1
    assert served.machine.first_token_at_s is None


@pytest.mark.parametrize("together", [False, True])
def test_the_second_token_ends_the_wait_and_follows_in_the_same_message(*, together: bool) -> None:
    served = called()
    served.decode(decode_pb2.Admitted())
    first, further = PrefillReplied(1, first_token()), TokensCame(1, [token(1), token(2)])
    if together:
        commands = served.handle(first, further)
    else:
        assert served.handle(first) == []
        commands = served.handle(further, after_s=0.001)
    assert tokens_of(commands) == [[100, 101, 102]]
    served.prefill(SENT)
    served.decode(token(3, LENGTH))
    assert served.token_ids == [100, 101, 102, 103]
    assert served.error is None


def test_a_second_token_that_comes_first_leaves_nothing_to_wait_for() -> None:
    served = called()
    assert served.decode(decode_pb2.Admitted(), token(1)) == []
    assert tokens_of(served.prefill(first_token())) == [[100, 101]]


def test_no_first_token_waits_for_more_than_50_ms() -> None:
    served = held(delay_s=0.1)
    assert served.machine.deadline_s == pytest.approx(CAME_S + 0.05)


def test_the_tpot_says_what_a_gap_may_be_also_where_costs_are_unknown() -> None:
    for knows_costs in (True, False):
        served = held(slo=Slo(tpot_s=0.01), knows_costs=knows_costs)
        assert served.machine.deadline_s == pytest.approx(CAME_S + learned_s(served) - 0.01)


def test_the_first_token_still_meets_its_ttft() -> None:
    served = held(slo=Slo(ttft_s=0.025))
    assert served.machine.deadline_s == pytest.approx(0.0225)


# ---- what ends it


def lost(served: Served) -> list[Command]:
    return served.session_lost()


def call_failed(served: Served) -> list[Command]:
    return served.prefill_ended(GONE)


def handed_over_badly(served: Served) -> list[Command]:
    return served.decode(hand_over_failed(DataLoss("digest")))


def decode_failed(served: Served) -> list[Command]:
    return served.decode(failed(DataLoss("damaged")))


def released(served: Served) -> list[Command]:
    return served.decode(decode_pb2.Released())


@pytest.mark.parametrize("fault", [lost, call_failed, handed_over_badly, decode_failed, released])
@pytest.mark.parametrize("policy", [LocalPolicy.PREFER, LocalPolicy.STRICT])
def test_a_failure_ends_the_wait_at_once(fault: Callable[[Served], list[Command]], policy: LocalPolicy) -> None:
    served = held(policy=policy)
    commands = fault(served)
    assert tokens_of(commands) == [[100]]
    assert served.machine.deadline_s is not None
    assert served.machine.deadline_s > served.now_s + 0.06


def test_the_client_gets_the_token_before_it_is_told_that_the_request_waits() -> None:
    served = held()
    for address in ("d1", "d2"):
        served.fleet.lose(address)
    first, notice = of(served.handle(SessionLost(1, "gone")), Respond)
    assert [each.token_id for each in first.message.tokens] == [100]
    assert notice.message.notice.startswith("the node node-21 was lost")


@pytest.mark.parametrize("reason", [LENGTH, common_pb2.FINISH_REASON_STOP])
def test_an_output_of_one_token_waits_for_nothing(reason: common_pb2.FinishReason.ValueType) -> None:
    served = called(asked=request(max_tokens=1))
    assert tokens_of(served.prefill(first_token(finish=reason))) == [[100]]


def test_the_end_of_the_output_ends_the_wait() -> None:
    served = held()
    commands = served.decode(decode_pb2.Admitted(), token(1, LENGTH))
    assert tokens_of(commands) == [[100, 101]]


def test_a_cancelled_request_gets_the_token_and_then_its_error() -> None:
    served = held()
    commands = served.handle(ClientCancelled(GONE))
    assert tokens_of(commands) == [[100]]
    assert commands[-1] == Finish(GONE)
    assert served.machine.deadline_s is None


def test_the_deadline_of_the_request_ends_the_wait() -> None:
    served = called(asked=request(timeout_s=CAME_S + 0.004))
    assert served.prefill(first_token(), after_s=CAME_S) == []
    assert served.machine.deadline_s == CAME_S + 0.004
    assert tokens_of(served.handle(TimePassed(), after_s=0.004)) == [[100]]
    assert isinstance(served.error, DeadlineExceeded)


# ---- who does not wait


@pytest.mark.parametrize(
    "how",
    [
        {"delay_s": 0.0},
        {"delay_s": 0.008},  # nearly as short as a gap may be
        {"objective": Objective(gap_factor=100.0)},
        {"knows_costs": False},
        {"slo": Slo(tpot_s=0.1)},
        {"slo": Slo(ttft_s=CAME_S)},
    ],
)
def test_nothing_waits_where_the_gap_is_allowed_or_unknown(how: dict[str, object]) -> None:
    served = called(**how)  # type: ignore[arg-type]
    assert tokens_of(served.prefill(first_token(), after_s=CAME_S)) == [[100]]


def test_nothing_waits_without_a_hand_over() -> None:
    served = called(policy=LocalPolicy.LOCAL)
    assert tokens_of(served.decode(accepted(), token(0))) == [[100]]


def test_nothing_waits_where_the_decode_node_samples_the_first_token_of_a_split_prompt() -> None:
    served = Served(slo=Slo(tpot_s=0.001))
    for node in served.fleet.decodes.values():
        node.second_token = taught(0.05)
    ticket = reserved()
    ticket.ticket.first_part, ticket.ticket.token_stop = True, 32
    served.decode(ticket)
    served.prefill(SCHEDULED, SENT)
    assert tokens_of(served.decode(decode_pb2.Admitted(), token(0))) == [[100]]


def test_nothing_waits_after_a_failure() -> None:
    served = called()
    served.prefill_ended(GONE)
    served.decode(reserved(lease=2))
    assert tokens_of(served.prefill(SCHEDULED, first_token(), call=2)) == [[100]]


def test_nothing_waits_where_the_client_has_a_part_of_the_answer() -> None:
    served = called(asked=replace(request(), output=(100, 101), revision=""))
    assert tokens_of(served.prefill(first_token(2))) == [[102]]
