"""One request as a list of events: the hand-over without failures, and each way in which it can fail."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from baton.core.errors import (
    BatonError,
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    Draining,
    InternalError,
    InvalidRequest,
    NoNode,
    Overloaded,
    UnknownLease,
)
from baton.core.types import LocalPolicy, Slo
from baton.gateway.core import events
from baton.gateway.core.events import DecodeReplied, FleetChanged, PrefillReplied, SessionLost, TimePassed, TokensCame
from baton.gateway.core.request import OutputEnd
from baton.gateway.request.attempts import BackOff
from baton.gateway.request.commands import (
    AskDecode,
    CallPrefill,
    CancelPrefill,
    Command,
    Finish,
    LeaveDecode,
    LoseNode,
    Respond,
    SubmitToDecode,
)
from baton.gateway.request.machine import RequestMachine
from baton.protos.internal.v1 import decode_pb2, prefill_pb2
from baton.protos.v1 import common_pb2, generation_pb2, node_status_pb2
from tests.unit.gateway.fleets import DECODE, PREFILL, SmallFleet, peer, request, rules, status
from tests.unit.gateway.served import (
    LENGTH,
    PROGRESS,
    SCHEDULED,
    SENT,
    Served,
    Words,
    accepted,
    failed,
    first_token,
    hand_over_failed,
    of,
    only,
    reserved,
    token,
)

GONE = NoNode("connection refused")


def prefilling(**how: object) -> Served:
    """A request whose prompt a prefill node computes."""
    served = Served(**how)  # type: ignore[arg-type]
    served.decode(reserved())
    served.prefill(SCHEDULED)
    return served


def decoding(**how: object) -> Served:
    """A request with one token from its prefill node and one from its decode node."""
    served = prefilling(**how)
    served.prefill(first_token(), SENT)
    served.decode(decode_pb2.Admitted(), token(1))
    return served


# ---- without failures


def test_a_remote_prefill_command_by_command() -> None:
    served = Served(prefills=1, decodes=1, start=False)
    (submit,) = served.handle(events.Started())
    assert isinstance(submit, SubmitToDecode)
    assert (submit.address, submit.request.prefill_available) == ("d1", True)
    assert list(submit.request.prompt_token_ids) == list(range(1, 65))
    (call,) = served.decode(reserved(lease=7))
    assert isinstance(call, CallPrefill)
    assert (call.address, call.request.ticket.lease.number, call.timeout_s) == ("p1", 7, 100.0)
    assert served.prefill(SCHEDULED, PROGRESS) == []
    (respond,) = served.prefill(first_token(), after_s=0.5)
    assert isinstance(respond, Respond)
    assert (respond.message.request_id, respond.message.text) == ("r", " 100")
    assert served.prefill(SENT) == []
    assert served.prefill_ended(None) == []
    (respond,) = served.decode(decode_pb2.Admitted(transfer_s=0.125), token(1), token(2))
    assert isinstance(respond, Respond)
    assert [each.token_id for each in respond.message.tokens] == [101, 102]
    leave, tokens, last, finish = served.decode(token(3, LENGTH), after_s=0.5)
    assert leave == LeaveDecode(1, cancel=False)
    assert finish == Finish(None)
    assert isinstance(tokens, Respond)
    assert isinstance(last, Respond)
    assert (last.message.finish_reason, last.message.usage.completion_tokens) == (LENGTH, 4)
    receipt = last.message.receipt
    assert (receipt.path, receipt.bytes_sent, receipt.transport) == (common_pb2.PATH_REMOTE, 4096, "cma")
    assert (receipt.ttft_s, receipt.total_s, receipt.attempts) == (0.5, 1.0, 1)
    assert served.machine.deadline_s is None


@pytest.mark.parametrize("retried", [False, True])
def test_a_request_teaches_the_fleet_what_its_first_token_took_unless_it_was_tried_twice(*, retried: bool) -> None:
    served = Served(prefills=2, decodes=1, start=False)
    for role, number in ((PREFILL, 11), (PREFILL, 12), (DECODE, 21)):
        reported = status(role, number, *([peer(21)] if role == PREFILL else []))
        reported.step_costs.points.add(tokens=64, seconds=0.005)
        served.fleet.status_received(role, f"{'p' if role == PREFILL else 'd'}{number % 10}", reported, 0.0)
    served.handle(events.Started())
    served.decode(reserved())
    call = 1
    if retried:
        served.prefill_ended(GONE)
        call = 2
    served.prefill(SCHEDULED, call=call)
    served.prefill(first_token(), SENT, call=call, after_s=0.05)
    served.decode(decode_pb2.Admitted(), token(1, LENGTH), after_s=1.0)
    learned = served.fleet.overheads.at(served.now_s)
    assert learned.local_s == 0.0
    assert learned.remote_s == 0.0 if retried else learned.remote_s > 0.0


def test_a_local_prefill_is_served() -> None:
    served = Served(prefills=0, policy=LocalPolicy.LOCAL)
    submit = only(served.commands, SubmitToDecode)
    assert not submit.request.prefill_available
    assert submit.request.policy == decode_pb2.LOCAL_POLICY_LOCAL
    first = token(0)
    first.prefill_s = 0.25
    served.decode(accepted(), first, token(1, LENGTH))
    assert served.error is None
    assert (served.receipt.path, served.receipt.prefill_s) == (common_pb2.PATH_LOCAL, 0.25)


def prompt_scored() -> list[common_pb2.PromptLogprob]:
    return [common_pb2.PromptLogprob(token_id=token_id, logprob=-0.5) for token_id in range(64)]


def first_token_with_prompt() -> prefill_pb2.PrefillEvent:
    first = first_token()
    first.first_token.prompt_logprobs.extend(prompt_scored())
    return first


def test_prompt_logprobs_come_once_although_the_hand_over_fails_after_the_first_token() -> None:
    served = prefilling()
    served.prefill(first_token_with_prompt())
    served.prefill_ended(GONE)
    second = token(1, LENGTH)
    second.prompt_logprobs.extend(prompt_scored())
    served.decode(accepted(), second)
    assert [list(message.prompt_logprobs) for message in served.messages] == [prompt_scored(), [], []]


def test_prompt_logprobs_come_from_the_second_prefill_node_if_the_first_sent_no_token() -> None:
    served = prefilling()
    served.prefill_ended(GONE)
    served.decode(reserved(lease=2))
    served.prefill(first_token_with_prompt(), call=2)
    assert [list(message.prompt_logprobs) for message in served.messages] == [prompt_scored()]


def test_prompt_logprobs_wait_with_the_first_token_for_which_later_tokens_wait() -> None:
    served = prefilling()
    assert served.decode(decode_pb2.Admitted(), token(1)) == []
    served.prefill(first_token_with_prompt())
    (message,) = served.messages
    assert (len(message.tokens), list(message.prompt_logprobs)) == (2, prompt_scored())


def test_tokens_that_come_together_leave_in_one_message() -> None:
    served = decoding()
    (respond,) = served.decode(token(2), token(3))
    assert isinstance(respond, Respond)
    assert respond.message.text == " 102 103"


def test_the_decode_node_may_be_faster_than_the_first_token() -> None:
    served = prefilling()
    assert served.decode(decode_pb2.Admitted(), token(1)) == []
    served.prefill(first_token())
    assert served.token_ids == [100, 101]


def test_the_last_token_may_come_after_the_release() -> None:
    served = prefilling()
    assert served.decode(decode_pb2.Released()) == []
    served.prefill(first_token(finish=LENGTH), SENT)
    assert served.error is None
    assert served.token_ids == [100]


def test_a_prompt_is_prefilled_where_it_waits_least() -> None:
    served = Served()
    other = Served(start=False)
    other.fleet.prefills["p1"].note_sent(64)
    other.handle(events.Started())
    assert only(served.decode(reserved()), CallPrefill).address == "p1"
    assert only(other.decode(reserved()), CallPrefill).address == "p2"


def test_the_prefill_node_that_was_placed_is_called_although_another_has_less_to_do_by_then() -> None:
    served = Served()
    served.fleet.prefills["p1"].note_sent(64)
    assert only(served.decode(reserved()), CallPrefill).address == "p1"


@pytest.mark.parametrize("change", ["lost", "restarted", "unpaired"])
def test_another_prefill_node_is_called_if_the_placed_one_cannot_be_used_any_more(change: str) -> None:
    served = Served()
    if change == "unpaired":
        served.fleet.prefills["p1"].take_peer(peer(21, node_status_pb2.PEER_PHASE_LOST))
    else:
        served.fleet.lose("p1")
    if change == "restarted":
        served.fleet.connect("p1", 1.0, restarts=1)
        served.fleet.prefills["p1"].note_sent(64)
    # The ticket is for the placed node alone, so the decode node is asked for another one.
    asked = only(served.decode(reserved()), AskDecode).message
    assert asked == decode_pb2.RenewTicket(failed_lease=1, prefill_incarnation=12)
    assert only(served.decode(reserved(lease=2)), CallPrefill).address == "p2"


# ---- the receipt waits for the prefill node's count


def test_the_last_message_waits_for_the_count_of_sent_bytes() -> None:
    served = prefilling()
    served.prefill(first_token())
    served.decode(decode_pb2.Admitted(), token(1, LENGTH))
    assert served.token_ids == [100, 101]
    assert of(served.commands, Finish) == []
    served.prefill(SENT)
    assert served.error is None
    assert served.receipt.bytes_sent == 4096


def test_the_last_message_waits_for_five_seconds_only() -> None:
    served = prefilling()
    served.prefill(first_token())
    served.decode(decode_pb2.Admitted(bytes_received=4096), token(1, LENGTH))
    assert served.machine.deadline_s == served.now_s + 5.0
    commands = served.handle(TimePassed(), after_s=5.0)
    assert of(commands, CancelPrefill) == [CancelPrefill(1)]
    assert served.error is None
    assert served.receipt.bytes_sent == 4096


@pytest.mark.parametrize("error", [None, GONE])
def test_the_last_message_does_not_wait_for_a_call_that_is_over(error: BatonError | None) -> None:
    served = prefilling()
    served.prefill(first_token())
    served.decode(decode_pb2.Admitted(), token(1, LENGTH))
    served.prefill_ended(error)
    assert served.error is None


def test_a_finished_output_outlives_its_decode_node() -> None:
    served = prefilling()
    served.prefill(first_token())
    served.decode(decode_pb2.Admitted(), token(1, LENGTH))
    served.session_lost()
    served.prefill(SENT)
    assert served.error is None


# ---- prefill nodes fail: another one, or the decode node itself, redoes the prompt


@pytest.mark.parametrize("how", ["call ends", "stream ends", "decode node reports it"])
def test_another_prefill_node_redoes_the_prompt(how: str) -> None:
    served = prefilling()
    if how == "call ends":
        commands = served.prefill_ended(GONE)
    elif how == "stream ends":
        commands = served.prefill_ended(None)
    else:
        commands = served.decode(hand_over_failed(DataLoss("digest")))
        assert only(commands, CancelPrefill) == CancelPrefill(1)
    asked = only(commands, AskDecode).message
    assert asked == decode_pb2.RenewTicket(failed_lease=1, prefill_incarnation=12)
    call = only(served.decode(reserved(lease=2)), CallPrefill)
    assert (call.call, call.address, call.request.ticket.lease.number) == (2, "p2", 2)
    served.prefill(first_token(), SENT, call=2)
    served.decode(decode_pb2.Admitted(), token(1, LENGTH))
    assert served.error is None
    assert served.token_ids == [100, 101]
    assert (served.receipt.attempts, served.receipt.prefill_node) == (2, "node-12")
    assert served.receipt.why.startswith("node-11 failed (")


def test_the_decode_node_prefills_itself_when_no_prefill_node_is_left() -> None:
    served = prefilling(prefills=1)
    asked = only(served.prefill_ended(GONE), AskDecode).message
    assert asked == decode_pb2.PrefillHere(failed_lease=1)
    served.decode(accepted(), token(0), token(1, LENGTH))
    assert served.error is None
    assert (served.receipt.path, served.receipt.attempts) == (common_pb2.PATH_LOCAL, 2)


def test_the_last_attempt_is_the_decode_nodes_although_prefill_nodes_are_left() -> None:
    served = prefilling(prefills=3)
    served.prefill_ended(GONE)
    served.decode(reserved(lease=2))
    asked = only(served.prefill_ended(GONE, call=2), AskDecode).message
    assert asked == decode_pb2.PrefillHere(failed_lease=2)


def test_tokens_sent_before_a_failed_hand_over_are_part_of_the_next_request_for_a_ticket() -> None:
    served = prefilling()
    served.prefill(first_token())
    asked = only(served.prefill_ended(GONE), AskDecode).message
    assert list(asked.output_token_ids) == [100]
    call = only(served.decode(reserved(lease=2)), CallPrefill)
    assert list(call.request.output_token_ids) == [100]
    served.prefill(first_token(1), call=2)
    served.decode(decode_pb2.Admitted(), token(2, LENGTH))
    assert served.token_ids == [100, 101, 102]


def test_a_hand_over_that_was_given_up_may_have_succeeded() -> None:
    served = prefilling()
    served.prefill(first_token())
    served.prefill_ended(GONE)
    served.decode(decode_pb2.Admitted(), token(1, LENGTH))
    assert served.error is None
    assert served.token_ids == [100, 101]


def test_a_report_about_an_older_lease_changes_nothing() -> None:
    served = prefilling()
    served.prefill_ended(GONE)
    assert served.decode(hand_over_failed(GONE)) == []
    served.decode(reserved(lease=2))
    assert served.decode(hand_over_failed(GONE)) == []


def strict(prefills: int = 1) -> Served:
    return prefilling(prefills=prefills, policy=LocalPolicy.STRICT)


def pause_over(served: Served) -> list[Command]:
    """Lets the time come at which the request goes on."""
    assert served.machine.deadline_s is not None
    return served.handle(TimePassed(), after_s=served.machine.deadline_s - served.now_s)


@pytest.mark.parametrize("error", [GONE, DataLoss("UCX: connection reset"), UnknownLease("closed"), Cancelled("back")])
def test_strict_goes_on_after_a_pause_when_the_link_of_the_only_prefill_node_breaks(error: BatonError) -> None:
    served = strict()
    (leave,) = served.prefill_ended(error)
    assert leave == LeaveDecode(1, cancel=True)
    assert served.machine.deadline_s is not None
    assert served.now_s < served.machine.deadline_s <= served.now_s + 0.1
    assert served.handle(FleetChanged()) == []
    assert only(pause_over(served), SubmitToDecode).attempt == 2
    served.decode(reserved(), attempt=2)
    served.prefill(first_token(), SENT, call=2)
    served.decode(decode_pb2.Admitted(), token(1, LENGTH), attempt=2)
    assert served.error is None
    assert served.token_ids == [100, 101]


def test_pauses_grow_and_attempts_go_on_until_the_deadline() -> None:
    served = strict()
    begun_s = [0.0]
    while not of(served.commands, Finish):
        served.prefill_ended(GONE, call=len(begun_s))
        if of(pause_over(served), SubmitToDecode):
            begun_s.append(served.now_s)
            served.decode(reserved(), attempt=len(begun_s))
    assert isinstance(served.error, DeadlineExceeded)
    assert served.now_s == pytest.approx(100.0)
    pauses_s = [later - earlier for earlier, later in pairwise(begun_s)]
    assert pauses_s[0] < 0.1 < pauses_s[4]
    assert all(1.0 <= pause_s <= 2.0 for pause_s in pauses_s[6:])
    assert is_closed(served.commands)


def test_requests_that_failed_together_do_not_come_back_together() -> None:
    pauses_s = set()
    for number in range(8):
        back_off = BackOff(f"r{number}")
        pauses_s.add(back_off.next_s())
    assert len(pauses_s) == 8


def test_a_lost_prefill_node_ends_a_strict_request_only_if_none_comes_back_in_time() -> None:
    served = strict()
    served.fleet.lose("p1")
    served.prefill_ended(GONE)
    notice = only(pause_over(served), Respond).message.notice
    assert notice == "no prefill node could hand over; waiting up to 20 s for another one"
    served.fleet.connect("p1", 10.0, restarts=1)
    assert of(served.handle(FleetChanged(), after_s=10.0), SubmitToDecode)
    served.fleet.lose("p1")
    served.decode(reserved(), attempt=2)
    pause_over(served)
    served.handle(TimePassed(), after_s=20.0)
    assert isinstance(served.error, NoNode)


def test_a_strict_request_that_ends_one_prefill_node_after_the_other_is_given_up() -> None:
    served = strict()
    for attempt in range(1, 5):
        served.prefill_ended(GONE, call=attempt)
        served.fleet.connect("p1", served.now_s, restarts=attempt)
        pause_over(served)
        served.decode(reserved(), attempt=attempt + 1)
    served.prefill_ended(GONE, call=5)
    assert isinstance(served.error, NoNode)
    assert "1 prefill attempt(s) failed" in served.error.message


def test_a_strict_request_that_fails_inside_prefill_nodes_is_given_up() -> None:
    served = strict()
    for attempt in range(1, 4):
        served.prefill_ended(InternalError("a bug"), call=attempt)
        if attempt < 3:
            pause_over(served)
            served.decode(reserved(), attempt=attempt + 1)
    assert isinstance(served.error, NoNode)
    assert "a bug" in served.error.message


def test_a_new_strict_request_waits_while_the_only_pair_is_made_again() -> None:
    served = Served(prefills=1, decodes=1, policy=LocalPolicy.STRICT, start=False)
    served.fleet.prefills["p1"].take_peer(peer(21, node_status_pb2.PEER_PHASE_LOST))
    assert served.handle(events.Started()) == []
    assert served.machine.waits_for_fleet
    served.fleet.prefills["p1"].take_peer(peer(21))
    assert of(served.handle(FleetChanged()), SubmitToDecode)


def test_a_new_strict_request_fails_if_the_pair_is_not_made_in_time() -> None:
    served = Served(prefills=1, decodes=1, policy=LocalPolicy.STRICT, start=False)
    served.fleet.prefills["p1"].take_peer(peer(21, node_status_pb2.PEER_PHASE_CONNECTING))
    served.handle(events.Started())
    served.handle(TimePassed(), after_s=20.0)
    assert isinstance(served.error, NoNode)
    assert served.error.message.startswith("no pair of nodes came within 20 s")


def test_a_new_strict_request_does_not_wait_for_a_pair_that_was_refused() -> None:
    served = Served(prefills=1, decodes=1, policy=LocalPolicy.STRICT, start=False)
    served.fleet.prefills["p1"].take_peer(peer(21, node_status_pb2.PEER_PHASE_REFUSED))
    served.handle(events.Started())
    assert isinstance(served.error, NoNode)


def test_strict_gives_the_last_overload_as_it_is() -> None:
    served = strict()
    served.prefill_ended(Overloaded("full", retry_after_s=2.0))
    assert isinstance(served.error, Overloaded)
    assert served.error.retry_after_s == 2.0


@pytest.mark.parametrize("error", [InvalidRequest("too long"), DeadlineExceeded("late")])
def test_a_failure_caused_by_the_client_ends_the_request(error: BatonError) -> None:
    served = prefilling()
    served.prefill_ended(error)
    assert served.error is error
    assert only(served.commands, LeaveDecode).cancel


def test_a_silent_prefill_node_is_replaced() -> None:
    served = prefilling()
    assert served.machine.deadline_s == 10.0
    served.prefill(PROGRESS, after_s=6.0)
    assert served.machine.deadline_s == 16.0
    commands = served.handle(TimePassed(), after_s=10.0)
    lost, cancel, ask = commands
    assert lost == LoseNode(node_status_pb2.ROLE_PREFILL, "p1", "no sign of life for 10 s")
    assert cancel == CancelPrefill(1)
    assert isinstance(ask, AskDecode)
    assert served.prefill(first_token()) == []  # too late
    assert only(served.decode(reserved(lease=2)), CallPrefill).address == "p2"


def test_any_sign_of_life_of_a_prefill_node_counts_while_the_call_is_queued_there() -> None:
    served = Served()
    served.decode(reserved())
    served.fleet.message_received(node_status_pb2.ROLE_PREFILL, "p1", 8.0)
    assert served.handle(TimePassed(), after_s=10.0) == []
    assert served.machine.deadline_s == 18.0
    served.prefill(SCHEDULED)
    assert served.machine.deadline_s == 20.0
    served.fleet.message_received(node_status_pb2.ROLE_PREFILL, "p1", 19.0)
    assert of(served.handle(TimePassed(), after_s=10.0), LoseNode)


def test_a_prefill_node_that_has_sent_everything_owes_nothing() -> None:
    served = prefilling()
    served.prefill(first_token(), SENT)
    assert served.machine.deadline_s == 30.0
    assert of(served.handle(TimePassed(), after_s=29.0), LoseNode) == []


# ---- decode nodes fail: prompt plus tokens so far are prefilled again


def test_a_lost_decode_node_is_replaced_and_the_stream_goes_on() -> None:
    served = decoding()
    commands = served.session_lost()
    assert only(commands, LeaveDecode).attempt == 1
    submit = only(commands, SubmitToDecode)
    assert (submit.attempt, submit.address, list(submit.request.output_token_ids)) == (2, "d2", [100, 101])
    assert served.decode(token(2)) == []  # sent by the lost node
    served.decode(reserved(), attempt=2)
    served.prefill(first_token(2), SENT, call=2)
    served.decode(decode_pb2.Admitted(), token(3, LENGTH), attempt=2)
    assert served.error is None
    assert served.token_ids == [100, 101, 102, 103]
    assert "node-21 was lost (gone)" in served.receipt.why


def test_a_silent_decode_node_is_replaced() -> None:
    served = decoding()
    assert served.machine.deadline_s == 30.0
    served.fleet.message_received(node_status_pb2.ROLE_DECODE, "d1", 20.0)
    assert served.handle(TimePassed(), after_s=30.0) == []
    assert served.machine.deadline_s == 50.0
    commands = served.handle(TimePassed(), after_s=20.0)
    assert only(commands, LoseNode) == LoseNode(node_status_pb2.ROLE_DECODE, "d1", "no sign of life for 30 s")
    assert only(commands, SubmitToDecode).address == "d2"


def test_a_decode_node_may_wait_for_room_before_it_answers() -> None:
    served = Served()
    assert served.machine.deadline_s == 40.0  # decode_stall_s and max_queue_s
    served.decode(accepted())
    assert served.machine.deadline_s == 30.0


def test_a_request_waits_for_the_only_decode_node_which_may_come_back() -> None:
    served = decoding(decodes=1)
    commands = served.session_lost()
    assert of(commands, SubmitToDecode) == []
    assert served.machine.waits_for_fleet
    assert served.machine.deadline_s == served.now_s + 20.0  # failover_wait_s
    assert served.handle(FleetChanged()) == []
    served.fleet.connect("d1", 5.0, restarts=1)
    assert only(served.handle(FleetChanged()), SubmitToDecode).address == "d1"
    assert not served.machine.waits_for_fleet


def test_its_client_is_informed_at_once_that_a_request_waits_for_a_decode_node() -> None:
    served = decoding(decodes=1)
    served.fleet.lose("d1")
    commands = served.handle(TokensCame(1, [token(2)]), SessionLost(1, "gone"))
    tokens, notice = (command.message for command in of(commands, Respond))
    assert tokens.text == " 102"
    expected = "the node node-21 was lost; waiting up to 20 s for another one"
    assert notice == generation_pb2.GenerateResponse(notice=expected)
    assert served.handle(FleetChanged(), after_s=1.0) == []


def test_the_wait_for_a_decode_node_ends_with_the_name_of_the_lost_one() -> None:
    served = decoding(decodes=1)
    served.session_lost()
    assert served.handle(TimePassed(), after_s=19.9) == []
    served.handle(TimePassed(), after_s=0.1)
    assert isinstance(served.error, NoNode)
    assert "node-21 was lost (gone), and no other node came within 20 s" in served.error.message
    assert served.error.retry_after_s is not None


def test_a_new_request_that_waited_for_a_place_goes_to_a_full_node_in_the_end() -> None:
    served = Served(decodes=1, start=False)
    served.fleet.lose("d1")
    assert served.handle(events.Started()) == []
    served.fleet.connect("d1", 0.0, restarts=1)  # and has places for others only
    assert served.handle(TimePassed(), after_s=19.0) == []
    assert only(served.handle(TimePassed(), after_s=1.0), SubmitToDecode).address == "d1"


def test_every_loss_allows_a_wait_of_its_own() -> None:
    served = decoding(decodes=1)
    served.session_lost()
    served.fleet.connect("d1", 15.0, restarts=1)
    served.handle(FleetChanged(), after_s=15.0)
    served.decode(accepted(), token(2), attempt=2)
    served.fleet.lose("d1")
    commands = served.handle(SessionLost(2, "again"), after_s=2.0)
    assert "node-121 was lost; waiting" in only(commands, Respond).message.notice
    assert served.machine.deadline_s == served.now_s + 20.0


def test_a_request_that_can_move_on_at_once_writes_no_notice() -> None:
    served = decoding()
    served.session_lost()
    assert [message.notice for message in served.messages if message.notice] == []


def test_messages_of_an_earlier_attempt_change_nothing() -> None:
    served = decoding()
    served.session_lost()
    late = (decode_pb2.Released(), failed(InternalError("bug")), token(2), accepted(), decode_pb2.Admitted())
    assert served.decode(*late) == []
    assert served.handle(SessionLost(1, "again")) == []
    assert only(served.decode(reserved(), attempt=2), CallPrefill).call == 2


def test_a_silent_node_is_not_chosen_again_before_its_next_status() -> None:
    served = decoding(decodes=1)
    served.handle(TimePassed(), after_s=30.0)
    assert served.machine.waits_for_fleet
    served.fleet.connect("d1", 31.0)
    assert only(served.handle(FleetChanged()), SubmitToDecode).address == "d1"


def give_other_weights(served: Served) -> None:
    """To the second decode node."""
    node = served.fleet.decodes["d2"]
    node.status.info.model.weights_digest = "other"
    node.take_status(node.status, "", served.now_s)


@pytest.mark.parametrize("error", [None, Draining("going away")])
def test_a_request_continues_only_on_a_node_with_the_same_weights(error: BatonError | None) -> None:
    served = decoding()
    give_other_weights(served)
    if error is None:
        served.session_lost()
    else:
        served.decode(failed(error))
    assert served.machine.waits_for_fleet


@pytest.mark.parametrize("error", [Overloaded("full"), Draining("going away"), None])
def test_a_request_without_tokens_may_begin_again_on_a_node_with_other_weights(error: BatonError | None) -> None:
    served = Served()
    give_other_weights(served)
    commands = served.session_lost() if error is None else served.decode(failed(error))
    assert only(commands, SubmitToDecode).address == "d2"


@pytest.mark.parametrize("error", [DataLoss("digest"), UnknownLease("gone"), DeadlineExceeded("lease")])
def test_a_decode_node_that_lost_the_request_is_replaced(error: BatonError) -> None:
    served = decoding()
    commands = served.decode(failed(error))
    assert only(commands, LeaveDecode) == LeaveDecode(1, cancel=False)
    assert of(commands, SubmitToDecode)


def test_an_error_that_no_node_can_cure_ends_the_request() -> None:
    served = decoding()
    served.decode(failed(InternalError("bug")))
    assert isinstance(served.error, InternalError)


def test_a_release_without_an_end_is_a_loss() -> None:
    served = decoding()
    commands = served.decode(decode_pb2.Released())
    assert only(commands, LeaveDecode) == LeaveDecode(1, cancel=False)
    assert of(commands, SubmitToDecode)


def test_nodes_lost_in_a_row_end_the_request_and_tokens_reset_the_count() -> None:
    served = decoding(decodes=1)
    for attempt in range(1, 5):  # the first of them after tokens
        served.session_lost(attempt)
        if attempt < 4:
            served.fleet.connect("d1", served.now_s, restarts=attempt)
            assert of(served.handle(FleetChanged()), SubmitToDecode)
    assert isinstance(served.error, NoNode)
    assert "4 nodes in a row were lost" in served.error.message


def test_a_node_whose_link_breaks_again_and_again_is_tried_again_after_pauses() -> None:
    served = decoding(decodes=1)
    for attempt in range(1, 9):
        served.fleet.lose("d1")
        served.handle(SessionLost(attempt, "reset"))
        served.fleet.connect("d1", served.now_s)
        commands = served.handle(FleetChanged()) if attempt == 1 else pause_over(served)
        assert only(commands, SubmitToDecode).attempt == attempt + 1
    served.decode(accepted(), token(2), token(3, LENGTH), attempt=9)
    assert served.error is None
    assert served.token_ids == [100, 101, 102, 103]


def test_a_first_token_that_can_no_longer_arrive_is_a_loss() -> None:
    served = prefilling()
    served.decode(decode_pb2.Admitted(), token(1))
    commands = served.prefill_ended(GONE)
    submit = only(commands, SubmitToDecode)
    assert list(submit.request.output_token_ids) == []
    served.decode(accepted(), token(0), token(1, LENGTH), attempt=2)
    assert served.error is None
    assert served.token_ids == [100, 101]


def test_tokens_after_a_lost_first_token_do_not_pass_in_the_same_batch() -> None:
    served = prefilling()
    served.handle(
        DecodeReplied(1, decode_pb2.Admitted()),
        events.PrefillEnded(1, GONE),
        TokensCame(1, [token(1)]),
    )
    assert served.machine.deadline_s is not None
    assert only(served.commands[1:], SubmitToDecode).attempt == 2


def test_a_token_that_no_node_will_send_is_an_error() -> None:
    served = Served()
    served.decode(accepted(), token(1))
    assert isinstance(served.error, InternalError)


# ---- overload and drain


def test_an_internal_error_before_the_first_token_is_retried_on_another_node() -> None:
    served = Served(prefills=1, decodes=2)
    submitted = only(served.decode(failed(InternalError("a bug"))), SubmitToDecode)
    assert submitted.address == "d2"
    served.decode(failed(InternalError("a bug there, too")), attempt=2)
    assert isinstance(served.error, InternalError)


def test_a_node_that_keeps_failing_gets_no_requests_for_a_while() -> None:
    served = Served(start=False)
    for _ in range(3):
        served.fleet.breakers.failed(served.fleet.decodes["d1"].incarnation, 0.0)
    assert only(served.handle(events.Started()), SubmitToDecode).address == "d2"


def test_the_only_node_is_asked_although_it_keeps_failing() -> None:
    served = Served(decodes=1, start=False)
    for _ in range(3):
        served.fleet.breakers.failed(served.fleet.decodes["d1"].incarnation, 0.0)
    assert only(served.handle(events.Started()), SubmitToDecode).address == "d1"


def test_a_node_without_room_is_passed_over() -> None:
    served = Served()
    commands = served.decode(failed(Overloaded("no blocks", retry_after_s=1.0)))
    assert only(commands, SubmitToDecode).address == "d2"
    served.decode(failed(Overloaded("no blocks", retry_after_s=3.0)), attempt=2)
    assert isinstance(served.error, Overloaded)
    assert served.error.retry_after_s is not None


def test_a_draining_decode_node_hands_the_request_over() -> None:
    served = decoding()
    commands = served.decode(failed(Draining("going away")))
    submit = only(commands, SubmitToDecode)
    assert (submit.address, list(submit.request.output_token_ids)) == ("d2", [100, 101])


def test_a_request_that_has_begun_waits_when_the_only_node_drains() -> None:
    served = decoding(decodes=1)
    commands = served.decode(failed(Draining("going away")))
    assert served.machine.waits_for_fleet
    assert "node-21 takes no more requests; waiting up to 20 s" in only(commands, Respond).message.notice


def test_without_a_node_a_new_request_fails_at_once() -> None:
    served = Served(decodes=0)
    assert isinstance(served.error, NoNode)
    assert served.error.retry_after_s == 1.0


# ---- cancellation and deadlines, in every phase


def waiting() -> Served:
    served = decoding(decodes=1, failover_wait_s=1000.0)
    served.session_lost()
    return served


def finished_but_for_the_receipt() -> Served:
    served = prefilling()
    served.prefill(first_token(finish=LENGTH))
    return served


PHASES: dict[str, Callable[[], Served]] = {
    "submitted": Served,
    "prefilling": prefilling,
    "decoding": decoding,
    "waiting for a node": waiting,
    "finished but for the receipt": finished_but_for_the_receipt,
}


def is_closed(commands: list[Command]) -> bool:
    """Whether every attempt and call that was opened has been closed."""
    left = {each.attempt for each in of(commands, LeaveDecode)}
    return left == {each.attempt for each in of(commands, SubmitToDecode)}


@pytest.mark.parametrize("phase", PHASES)
def test_cancelling_closes_everything(phase: str) -> None:
    served = PHASES[phase]()
    gone = Cancelled("the client is gone")
    served.handle(events.ClientCancelled(gone))
    assert served.error is gone
    assert is_closed(served.commands)
    assert served.machine.deadline_s is None
    assert served.handle(TokensCame(1, [token(2)]), PrefillReplied(1, SENT), FleetChanged(), TimePassed()) == []


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "finished but for the receipt"])
def test_the_deadline_ends_the_request(phase: str) -> None:
    served = PHASES[phase]()
    served.fleet.connect("d1", 99.0)
    served.fleet.connect("p1", 99.0)
    served.handle(PrefillReplied(1, PROGRESS), after_s=99.0)
    assert of(served.commands, Finish) == []
    served.handle(TimePassed(), after_s=1.0)
    assert isinstance(served.error, DeadlineExceeded)
    assert "within its 100 s" in served.error.message
    assert is_closed(served.commands)


def test_the_deadlines_error_names_earlier_failures() -> None:
    served = waiting()
    served.handle(TimePassed(), after_s=100.0)
    assert isinstance(served.error, DeadlineExceeded)
    assert "(node-21 was lost (gone))" in served.error.message


# ---- a client that lost its gateway


def test_an_output_that_the_client_has_whole_ends_without_a_node() -> None:
    whole = replace(request(), output=(100, 101), ended=OutputEnd(LENGTH, ""))
    machine = RequestMachine(whole, rules(), SmallFleet(0, 0), Words())
    assert "".join(machine.resume()) == " 100 101"
    last, finish = machine.handle([events.Started()], 0.5)
    assert isinstance(last, Respond)
    assert (last.message.text, list(last.message.tokens)) == ("", [])
    assert (last.message.finish_reason, last.message.usage.completion_tokens) == (LENGTH, 2)
    assert finish == Finish(None)


# ---- split prompts, SLOs


def test_the_decode_node_draws_the_first_token_of_a_split_prompt() -> None:
    served = Served()
    asked = reserved()
    asked.ticket.token_stop, asked.ticket.first_part = 32, True
    served.decode(asked)
    sent = prefill_pb2.PrefillEvent(sent=prefill_pb2.PrefillSent(tokens_sent=32, prefill_s=0.5))
    served.prefill(SCHEDULED, sent)
    served.prefill_ended(None)
    first = token(0)
    first.prefill_s, first.queue_s = 0.25, 0.125
    served.decode(decode_pb2.Admitted(), first, token(1, LENGTH))
    assert served.error is None
    receipt = served.receipt
    assert (receipt.path, receipt.split_tokens, receipt.prefill_s) == (common_pb2.PATH_SPLIT, 32, 0.75)
    assert receipt.queue_s >= 0.125


def test_a_prefill_node_lost_with_a_first_part_is_replaced() -> None:
    served = Served(prefills=2)
    asked = reserved()
    asked.ticket.token_stop, asked.ticket.first_part = 32, True
    served.decode(asked)
    ask = only(served.prefill_ended(GONE), AskDecode)
    assert isinstance(ask.message, decode_pb2.RenewTicket)


@pytest.mark.parametrize(("refuse_late", "begun"), [(True, False), (True, True), (False, False)])
def test_a_request_that_would_be_late_is_refused_at_once_where_the_gateway_says_so(
    refuse_late: bool, begun: bool
) -> None:
    fleet = SmallFleet(1, 1)
    busy = status(PREFILL, 11, peer(21))
    busy.backlog_s = 9.0
    busy.step_costs.points.add(tokens=1024, seconds=0.025)
    fleet.status_received(PREFILL, "p1", busy, 0.0)
    settings = replace(rules(), slo=Slo(ttft_s=0.5, tpot_s=0.02), refuse_late=refuse_late)
    machine = RequestMachine(request(), settings, fleet, Words())
    if begun:  # it has lost its node, and may not lose its tokens
        machine._output.token_ids.append(100)
    (command,) = machine.handle([events.Started()], 0.0)
    if refuse_late and not begun:
        assert isinstance(command, Finish)
        assert isinstance(command.error, Overloaded)
        assert "is due 0.5 s after arrival" in str(command.error)
    else:
        assert isinstance(command, SubmitToDecode)
        assert (command.request.ttft_budget_s, command.request.tpot_s) == (0.0 if begun else 0.5, 0.02)
