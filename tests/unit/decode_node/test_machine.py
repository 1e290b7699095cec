"""Requests on a decode node as lists of events, and the commands that follow each event."""

import itertools
from dataclasses import replace

import pytest

from baton.core.errors import DataLoss, Draining, InternalError, InvalidRequest, Overloaded
from baton.core.types import FinishReason, PromptLogprob, TokenOutput
from baton.engine.events import ChunkComputed, DraftsChecked, PromptScored, RequestFailed, StepEvents
from baton.protos.internal.v1 import decode_pb2 as pb
from baton.protos.v1 import common_pb2
from baton.rpc.convert import prompt_logprobs_from_proto
from baton.rpc.error_detail import from_detail, to_detail
from decode_node.commands import (
    Abort,
    Admit,
    CloseLease,
    EndSession,
    ExtendReserved,
    OpenLease,
    Reserve,
    SendLeaseEnded,
)
from decode_node.commands import PrefillHere as PrefillHereCommand
from decode_node.events import (
    Admitted,
    Closing,
    DrainStarted,
    EngineRefused,
    LeaseFailed,
    PeerLost,
    QuietReceived,
    Reserved,
    SessionClosed,
    SessionOpened,
    StepDone,
)
from decode_node.task_times import ChunkTimes
from tests.unit.decode_node.scene import LEASE_S, SESSION, Scene, names, reservation, sent, token

ENDED = ["Send failed", "Abort"]


@pytest.fixture
def scene() -> Scene:
    return Scene()


# ---- without failures


def test_a_request_gets_blocks_then_a_lease_then_its_ticket(scene: Scene) -> None:
    (reserve,) = scene.submit(1, output=[8, 9], max_queue_s=2.0)
    assert isinstance(reserve, Reserve)
    assert reserve.request.request_id == f"{SESSION}.1"
    assert reserve.request.output == (8, 9)
    scene.now_s += 0.5
    (opened,) = scene.reserved(1)
    assert isinstance(opened, OpenLease)
    grant = opened.grant
    assert (grant.number, grant.block_ids) == (1, (3, 4, 5))
    assert (grant.token_start, grant.token_stop, grant.resume_at) == (16, 102, 90)
    (answer,) = sent(scene.opened(1))
    ticket = answer.reserved.ticket
    assert (ticket.lease.number, ticket.lease.incarnation, ticket.lease.remaining_s) == (1, 77, LEASE_S)
    assert (ticket.decode_node, ticket.decode_address) == ("decode-0", "127.0.0.1:7002")
    assert (ticket.token_start, ticket.token_stop, ticket.resume_at) == (16, 102, 90)
    assert (answer.reserved.key, answer.reserved.cached_tokens, answer.reserved.queue_s) == (1, 16, 0.5)


def test_a_lease_has_the_slot_of_the_reservation(scene: Scene) -> None:
    scene.submit(1, output=[8, 9])
    (opened,) = scene.on(Reserved(f"{SESSION}.1", replace(reservation(1), state_slot=5)))
    assert isinstance(opened, OpenLease)
    assert opened.grant.state_slot == 5


@pytest.mark.parametrize("filled_first", [True, False])
def test_it_is_admitted_when_filled_and_handed_over_and_its_lease_is_closed(scene: Scene, filled_first: bool) -> None:
    lease = scene.filling(1)
    both = [scene.filled, scene.hand_over] if filled_first else [scene.hand_over, scene.filled]
    assert both[0](lease) == []
    scene.now_s += 0.5
    assert both[1](lease) == [CloseLease(lease)]
    admitted, admit = scene.closed(lease)
    (message,) = sent([admitted])
    assert (message.admitted.bytes_received, message.admitted.segments) == (4096, 2)
    # From the first token's sampling to now: the time that the prefill node reports, and the wait on this node.
    assert message.admitted.transfer_s == pytest.approx(0.25 if filled_first else 0.75)
    assert admit == Admit(f"{SESSION}.1", TokenOutput(7, 0))


def test_drafts_of_the_prefill_node_come_with_the_first_token(scene: Scene) -> None:
    lease = scene.filling(1)
    scene.hand_over(lease, drafts=range(3, 100))
    scene.filled(lease)
    _, admit = scene.closed(lease)
    assert admit == Admit(f"{SESSION}.1", TokenOutput(7, 0), tuple(range(3, 19)))


def test_tokens_are_sent_and_the_last_one_ends_the_request(scene: Scene) -> None:
    scene.decoding(1)
    (step,) = sent(scene.step(token(1, 1)))
    assert [(each.key, each.token.token_id) for each in step.step.tokens] == [(1, 101)]
    last = token(1, 2)._replace(finish_reason=FinishReason.STOP, stop_reason="2")
    commands = scene.step(last)
    assert names(commands) == ["Send step", "Abort"]
    (ended,) = sent(commands)[0].step.tokens
    assert (ended.finish_reason, ended.stop_reason) == (common_pb2.FINISH_REASON_STOP, "2")
    assert scene.machine.busy
    assert names(scene.aborted(1)) == ["Send released"]
    assert not scene.machine.busy


def test_a_first_token_that_is_the_last_one_ends_the_request(scene: Scene) -> None:
    lease = scene.closing(1)
    scene.closed(lease)
    assert scene.on(Admitted(f"{SESSION}.1", FinishReason.LENGTH)) == [Abort(f"{SESSION}.1")]
    assert names(scene.aborted(1)) == ["Send released"]


def test_a_finished_hand_over_needs_no_kv(scene: Scene) -> None:
    lease = scene.filling(1)
    assert scene.hand_over(lease, finished=True) == [CloseLease(lease)]
    assert scene.closed(lease) == [Abort(f"{SESSION}.1")]
    assert names(scene.aborted(1)) == ["Send released"]


def test_a_lease_without_tokens_is_filled_before_it_is_open(scene: Scene) -> None:
    lease = scene.opening(1)
    assert scene.filled(lease) == []
    assert names(scene.opened(lease)) == ["Send reserved"]
    assert scene.hand_over(lease) == [CloseLease(lease)]


# ---- where the prompt is prefilled


@pytest.mark.parametrize(
    ("policy", "available", "cached_tokens", "why"),
    [
        (pb.LOCAL_POLICY_LOCAL, True, 0, "the policy is local"),
        (pb.LOCAL_POLICY_PREFER, False, 0, "no prefill node is available"),
        (pb.LOCAL_POLICY_PREFER, True, 69, "31 uncached prompt tokens, under the threshold of 32"),
        (pb.LOCAL_POLICY_PREFER, True, 68, ""),
        (pb.LOCAL_POLICY_STRICT, False, 99, ""),
    ],
)
def test_policy_peers_and_length_decide_where_a_prompt_is_prefilled(
    scene: Scene, policy: pb.LocalPolicy.ValueType, available: bool, cached_tokens: int, why: str
) -> None:
    scene.submit(1, policy=policy, prefill_available=available)
    commands = scene.reserved(1, cached_tokens=cached_tokens)
    if not why:
        assert names(commands) == ["OpenLease"]
        return
    accepted, here = commands
    (message,) = sent([accepted])
    assert (message.accepted.why, message.accepted.cached_tokens) == (why, cached_tokens)
    assert here == PrefillHereCommand(f"{SESSION}.1", ())


def test_the_first_token_of_a_prefill_here_has_its_duration(scene: Scene) -> None:
    scene.prefilling_here(1)
    scene.now_s += 2.0
    (first,) = sent(scene.step(token(1, 0)))
    (second,) = sent(scene.step(token(1, 1)))
    assert first.step.tokens[0].prefill_s == 2.0
    assert not second.step.tokens[0].HasField("prefill_s")


def test_the_first_token_of_a_prefill_here_has_the_times_of_its_chunks_for_a_trace(scene: Scene) -> None:
    scene.submit(1, policy=pb.LOCAL_POLICY_LOCAL, traceparent="00-1-2-01")
    scene.now_s += 1.0
    scene.reserved(1)
    scene.prefilling_here(2)
    chunks = [ChunkComputed(f"{SESSION}.{key}", start, start + 50, ()) for key in (1, 2) for start in (0, 50)]
    for number, ended in enumerate((chunks[::2], chunks[1::2])):
        scene.now_s += 1.0
        tokens = tuple(token(key, 0) for key in (1, 2)) if number else ()
        commands = scene.on(StepDone(StepEvents(number, 0.01, chunks=tuple(ended), tokens=tokens)))
    (message,) = sent(commands)
    traced, other = message.step.tokens
    assert [(each.ended_s, each.token_start, each.token_stop) for each in traced.prompt_chunks] == [
        (2.0, 0, 50),
        (3.0, 50, 100),
    ]
    assert not other.prompt_chunks
    (message,) = sent(scene.step(token(1, 1)))
    assert not message.step.tokens[0].prompt_chunks


def test_a_prompt_of_very_many_chunks_reports_few_that_cover_all() -> None:
    times = ChunkTimes()
    for index in range(1000):
        times.add(index, index + 1, float(index))
    taken = times.take()
    assert len(taken) <= 64
    assert (taken[0].token_start, taken[-1].token_stop, taken[-1].ended_s) == (0, 1000, 999.0)
    assert all(one.token_stop == other.token_start for one, other in itertools.pairwise(taken))
    assert sum(each.steps for each in taken) == 1000
    assert not times.take()


# ---- tokens and other messages


def test_all_tokens_of_a_step_go_in_one_message_for_each_gateway(scene: Scene) -> None:
    scene.on(SessionOpened(2))
    for session, key in ((1, 1), (2, 1), (1, 2)):
        scene.submit(key, session=session, policy=pb.LOCAL_POLICY_LOCAL)
        scene.on(_reserved(session, key))
    commands = scene.step(token(1, 0), token(1, 0, session=2), token(2, 0))
    assert [(command.session, len(command.message.step.tokens)) for command in commands] == [(1, 2), (2, 1)]  # type: ignore[union-attr]


def test_a_failure_comes_after_the_tokens_of_its_step(scene: Scene) -> None:
    scene.prefilling_here(1)
    scene.prefilling_here(2)
    failed = RequestFailed(f"{SESSION}.1", InternalError("a step failed"))
    commands = scene.on(StepDone(StepEvents(1, 0.1, tokens=(token(2, 0),), failed=(failed,))))
    assert names(commands) == ["Send step", *ENDED]


def test_tokens_of_requests_that_end_or_are_unknown_are_dropped(scene: Scene) -> None:
    scene.decoding(1)
    scene.cancel(1)
    assert scene.step(token(1, 1), token(9, 0)) == []


# ---- leases that fail


def test_a_loss_is_reported_once_and_the_request_waits_for_its_gateway(scene: Scene) -> None:
    lease = scene.filling(1)
    (message,) = sent(scene.refuse_segment(lease))
    failed = message.hand_over_failed
    assert (failed.key, failed.lease) == (1, lease)
    assert isinstance(from_detail(failed.error), DataLoss)
    assert scene.refuse_segment(lease) == []
    assert scene.on(PeerLost(1, "prefill-0", (lease,))) == []
    assert scene.machine.busy


def test_a_lost_peer_and_a_quiet_with_an_error_are_losses(scene: Scene) -> None:
    first, second = scene.filling(1), scene.filling(2)
    (lost,) = sent(scene.on(PeerLost(3, "prefill-0", (first, 99))))
    assert (lost.hand_over_failed.key, lost.hand_over_failed.error.message) == (1, "prefill-0 is gone")
    quiet = pb.Quiet(lease=second, error=to_detail(Overloaded("no room")))
    (refused,) = sent(scene.on(QuietReceived(4, quiet)))
    assert (refused.hand_over_failed.key, refused.hand_over_failed.error.message) == (2, "no room")
    assert scene.on(QuietReceived(4, pb.Quiet(lease=second))) == []


def test_a_hand_over_that_becomes_complete_after_a_loss_counts(scene: Scene) -> None:
    lease = scene.filling(1)
    scene.on(PeerLost(1, "prefill-0", (lease,)))
    scene.filled(lease)
    assert scene.hand_over(lease) == [CloseLease(lease)]


def test_a_hand_over_before_a_loss_does_not_count_for_the_renewed_lease(scene: Scene) -> None:
    """The prefill node hands over while segments are in flight, so its link may fail afterwards."""
    lease = scene.filling(1)
    assert scene.hand_over(lease) == []
    assert names(scene.on(PeerLost(1, "prefill-0", (lease,)))) == ["Send hand_over_failed"]
    scene.renew(1, lease, [5])
    scene.closed(lease)
    (opened,) = scene.reserved(1)
    assert isinstance(opened, OpenLease)
    renewed = opened.grant.number
    scene.opened(renewed)
    assert scene.filled(renewed) == []
    assert scene.hand_over(renewed) == [CloseLease(renewed)]


def test_a_renewed_ticket_has_a_new_lease_for_the_same_blocks(scene: Scene) -> None:
    lease = scene.filling(1)
    scene.filled(lease)
    assert scene.renew(1, lease, [5]) == [CloseLease(lease)]
    assert scene.closed(lease) == [ExtendReserved(f"{SESSION}.1", (5,))]
    (opened,) = scene.reserved(1)
    assert isinstance(opened, OpenLease)
    assert (opened.grant.number, opened.grant.token_stop) == (lease + 1, 101)
    (message,) = sent(scene.opened(lease + 1))
    assert message.reserved.ticket.lease.number == lease + 1
    # Events of the old lease do not count for the new one, and a new loss is reported again.
    assert scene.hand_over(lease + 1) == []
    assert names(scene.refuse_segment(lease + 1)) == ["Send hand_over_failed"]


def test_blocks_that_cannot_be_extended_fail_the_request(scene: Scene) -> None:
    lease = scene.filling(1)
    scene.renew(1, lease, [5])
    scene.closed(lease)
    commands = scene.on(EngineRefused(f"{SESSION}.1", Overloaded("no room for another block")))
    assert names(commands) == ENDED


def test_a_prompt_left_to_this_node_is_computed_after_the_lease_is_closed(scene: Scene) -> None:
    lease = scene.filling(1)
    assert scene.prefill_here(1, lease, [5]) == [CloseLease(lease)]
    accepted, here = scene.closed(lease)
    assert sent([accepted])[0].accepted.why == "no prefill node could do it"
    assert here == PrefillHereCommand(f"{SESSION}.1", (5,))


def test_messages_about_an_older_lease_are_ignored(scene: Scene) -> None:
    old = scene.filling(1)
    scene.renew(1, old)
    scene.closed(old)
    scene.reserved(1)
    scene.opened(old + 1)
    for message in (scene.hand_over, scene.filled, scene.refuse_segment, scene.closed, scene.opened):
        assert message(old) == []
    assert scene.renew(1, old) == []
    assert scene.prefill_here(1, old) == []
    assert scene.hand_over(old + 1) == []
    assert scene.filled(old + 1) == [CloseLease(old + 1)]


def test_messages_that_come_while_the_lease_is_being_closed_are_ignored(scene: Scene) -> None:
    lease = scene.closing(1)
    assert scene.renew(1, lease) == []
    assert scene.prefill_here(1, lease) == []
    assert scene.refuse_segment(lease) == []
    assert names(scene.closed(lease)) == ["Send admitted", "Admit"]


def test_a_lease_that_does_not_open_is_closed_before_the_blocks_are_given_back(scene: Scene) -> None:
    lease = scene.opening(1)
    commands = scene.on(LeaseFailed(lease, InternalError("no such block")))
    assert names(commands) == ["Send failed", "SendLeaseEnded", "CloseLease"]
    assert scene.on(LeaseFailed(lease, InternalError("it is not open"))) == [Abort(f"{SESSION}.1")]


def test_a_lease_that_does_not_close_fails_the_request(scene: Scene) -> None:
    lease = scene.closing(1)
    commands = scene.on(LeaseFailed(lease, InternalError("the transfer ended")))
    assert names(commands) == ["Send failed", "SendLeaseEnded", "Abort"]


# ---- cancelling


def test_a_request_that_waits_is_cancelled_at_once(scene: Scene) -> None:
    scene.submit(1, max_queue_s=5.0)
    scene.on(EngineRefused(f"{SESSION}.1", Overloaded("full")))
    assert scene.cancel(1) == [Abort(f"{SESSION}.1")]
    assert names(scene.aborted(1)) == ["Send released"]


def test_blocks_that_are_reserved_after_the_cancel_are_given_back(scene: Scene) -> None:
    scene.submit(1)
    assert scene.cancel(1) == []
    assert scene.reserved(1) == [Abort(f"{SESSION}.1")]


def test_a_lease_that_opens_after_the_cancel_is_closed(scene: Scene) -> None:
    lease = scene.opening(1)
    assert scene.cancel(1) == [SendLeaseEnded(lease)]
    assert scene.opened(lease) == [CloseLease(lease)]
    assert scene.closed(lease) == [Abort(f"{SESSION}.1")]


def test_a_lease_that_fails_to_open_after_the_cancel_is_closed(scene: Scene) -> None:
    lease = scene.opening(1)
    scene.cancel(1)
    assert scene.on(LeaseFailed(lease, InternalError("no such block"))) == [CloseLease(lease)]
    assert scene.on(LeaseFailed(lease, InternalError("it is not open"))) == [Abort(f"{SESSION}.1")]


def test_an_open_lease_is_closed_before_the_blocks_are_given_back(scene: Scene) -> None:
    lease = scene.filling(1)
    assert scene.cancel(1) == [SendLeaseEnded(lease), CloseLease(lease)]
    assert scene.closed(lease) == [Abort(f"{SESSION}.1")]
    assert names(scene.aborted(1)) == ["Send released"]


def test_a_lease_that_is_being_closed_is_not_closed_twice(scene: Scene) -> None:
    lease = scene.closing(1)
    assert scene.cancel(1) == [SendLeaseEnded(lease)]
    assert scene.closed(lease) == [Abort(f"{SESSION}.1")]


def test_a_decoding_request_is_cancelled(scene: Scene) -> None:
    scene.decoding(1)
    assert scene.cancel(1) == [Abort(f"{SESSION}.1")]


def test_a_second_cancel_and_one_for_an_unknown_request_do_nothing(scene: Scene) -> None:
    scene.decoding(1)
    scene.cancel(1)
    assert scene.cancel(1) == []
    assert scene.cancel(2) == []
    assert names(scene.aborted(1)) == ["Send released"]
    assert scene.cancel(1) == []


def test_a_session_that_breaks_ends_its_requests_and_no_others(scene: Scene) -> None:
    scene.on(SessionOpened(2))
    scene.submit(1, session=2, policy=pb.LOCAL_POLICY_LOCAL)
    scene.on(_reserved(2, 1))
    scene.decoding(1)
    lease = scene.filling(2)
    commands = scene.on(SessionClosed(SESSION))
    assert set(commands) == {Abort(f"{SESSION}.1"), SendLeaseEnded(lease), CloseLease(lease)}
    assert names(scene.step(token(1, 0, session=2))) == ["Send step"]


# ---- deadlines


@pytest.mark.parametrize(
    ("phase", "then"),
    [
        ("opening", ["SendLeaseEnded"]),
        ("filling", ["SendLeaseEnded", "CloseLease"]),
        ("closing", ["SendLeaseEnded"]),
        ("decoding", ["Abort"]),
        ("prefilling_here", ["Abort"]),
    ],
)
def test_a_request_fails_when_its_budget_is_over_in_every_phase(scene: Scene, phase: str, then: list[str]) -> None:
    getattr(scene, phase)(1, budget_s=10.0)
    commands = scene.after(10.0)
    assert names(commands) == ["Send failed", *then]
    assert sent(commands)[0].failed.error.message == "the request's budget of 10 s is over"
    assert scene.machine.deadline_s is None


def test_a_lease_that_is_not_filled_in_time_fails_the_request(scene: Scene) -> None:
    lease = scene.filling(1, budget_s=100.0)
    commands = scene.after(LEASE_S)
    assert names(commands) == ["Send failed", "SendLeaseEnded", "CloseLease"]
    assert f"within the lease's {LEASE_S:g} s" in sent(commands)[0].failed.error.message
    assert scene.closed(lease) == [Abort(f"{SESSION}.1")]


def test_a_renewed_lease_has_its_own_time(scene: Scene) -> None:
    lease = scene.filling(1)
    scene.after(LEASE_S - 1)
    scene.renew(1, lease)
    scene.closed(lease)
    scene.reserved(1)
    scene.opened(lease + 1)
    assert scene.after(LEASE_S - 1) == []
    assert names(scene.after(1)) == ["Send failed", "SendLeaseEnded", "CloseLease"]


def test_an_admitted_request_has_no_deadline_but_its_budget(scene: Scene) -> None:
    scene.decoding(1)
    assert scene.machine.deadline_s is None


def test_the_timer_is_for_the_first_of_all_deadlines(scene: Scene) -> None:
    scene.decoding(1, budget_s=20.0)
    scene.decoding(2, budget_s=5.0)
    assert scene.machine.deadline_s == scene.now_s + 5.0
    scene.after(5.0)
    assert scene.machine.deadline_s == scene.now_s + 15.0


# ---- refusals, drain and the end of the process


def test_a_sampling_parameter_out_of_range_is_refused(scene: Scene) -> None:
    commands = scene.submit(1, temperature=-1.0)
    assert names(commands) == ["Send failed", "Send released"]
    assert isinstance(from_detail(sent(commands)[0].failed.error), InvalidRequest)
    assert not scene.machine.busy


def test_a_key_in_use_is_refused_and_its_request_goes_on(scene: Scene) -> None:
    scene.decoding(1)
    commands = scene.submit(1)
    assert names(commands) == ["Send failed", "Send released"]
    assert isinstance(from_detail(sent(commands)[0].failed.error), InvalidRequest)
    assert names(scene.step(token(1, 1))) == ["Send step"]


def test_a_request_that_the_engine_refuses_fails(scene: Scene) -> None:
    scene.submit(1)
    assert names(scene.on(EngineRefused(f"{SESSION}.1", InvalidRequest("no tokens")))) == ENDED


def test_a_request_that_the_engine_does_not_admit_fails(scene: Scene) -> None:
    lease = scene.closing(1)
    scene.closed(lease)
    assert names(scene.on(EngineRefused(f"{SESSION}.1", InvalidRequest("wrong index")))) == ENDED


def test_a_failure_of_the_engine_reaches_a_reserved_request_when_it_is_admitted(scene: Scene) -> None:
    lease = scene.filling(1)
    failed = RequestFailed(f"{SESSION}.1", InternalError("the engine ended"))
    assert scene.on(StepDone(StepEvents(1, 0.0, failed=(failed,)))) == []
    scene.filled(lease)
    assert scene.hand_over(lease) == [CloseLease(lease)]


def test_a_draining_node_refuses_new_requests_and_serves_the_others(scene: Scene) -> None:
    scene.decoding(1)
    scene.on(DrainStarted())
    commands = scene.submit(2)
    assert names(commands) == ["Send failed", "Send released"]
    assert isinstance(from_detail(sent(commands)[0].failed.error), Draining)
    assert names(scene.step(token(1, 1))) == ["Send step"]


def test_sessions_end_once_the_last_request_is_released(scene: Scene) -> None:
    scene.decoding(1)
    lease = scene.filling(2)
    assert set(scene.on(Closing())) == {Abort(f"{SESSION}.1"), SendLeaseEnded(lease), CloseLease(lease)}
    assert names(scene.aborted(1)) == ["Send released"]
    scene.closed(lease)
    assert names(scene.aborted(2)) == ["Send released", "EndSession"]


def test_without_requests_sessions_end_at_once(scene: Scene) -> None:
    assert scene.on(Closing()) == [EndSession(SESSION)]


def _reserved(session: int, key: int) -> Reserved:
    return Reserved(f"{session}.{key}", reservation(key, session=session))


# ---- prompt logprobs


def test_the_first_token_of_a_prefill_here_has_the_prompt_logprobs(scene: Scene) -> None:
    scene.prefilling_here(1)
    scene.prefilling_here(2)
    scored = PromptScored(f"{SESSION}.2", (PromptLogprob(7, None), PromptLogprob(8, -0.5, ((9, -0.25),))))
    (command,) = scene.on(StepDone(StepEvents(1, 0.1, tokens=(token(1, 0), token(2, 0)), scored=(scored,))))
    (message,) = sent([command])
    plain, with_them = message.step.tokens
    assert not plain.prompt_logprobs
    assert prompt_logprobs_from_proto(with_them.prompt_logprobs) == scored.logprobs


def test_prompt_logprobs_of_a_request_that_ends_are_dropped(scene: Scene) -> None:
    scene.prefilling_here(1)
    scene.cancel(1)
    scored = PromptScored(f"{SESSION}.1", (PromptLogprob(7, None),))
    assert scene.on(StepDone(StepEvents(1, 0.1, tokens=(token(1, 0),), scored=(scored,)))) == []


def test_a_prompt_whose_logprobs_are_wanted_counts_as_uncached(scene: Scene) -> None:
    scene.submit(1, prompt_logprobs=0)
    assert names(scene.reserved(1, cached_tokens=96)) == ["OpenLease"]
    scene.submit(2, prompt_logprobs=0, policy=pb.LOCAL_POLICY_LOCAL)
    accepted, _ = scene.reserved(2, cached_tokens=96)
    (message,) = sent([accepted])
    assert message.accepted.cached_tokens == 0


def test_a_continued_request_has_its_prompt_logprobs_already(scene: Scene) -> None:
    scene.submit(1, prompt_logprobs=0, output=(5,))
    accepted, _ = scene.reserved(1, cached_tokens=96)
    (message,) = sent([accepted])
    assert message.accepted.cached_tokens == 96


def test_a_lease_has_a_key_of_its_own_which_its_ticket_alone_carries() -> None:
    scene, keys = Scene(), set()
    for request in (1, 2):
        scene.submit(request)
        (opened,) = scene.reserved(request)
        assert isinstance(opened, OpenLease)
        (answer,) = sent(scene.opened(opened.grant.number))
        assert answer.reserved.ticket.lease.key == opened.grant.key
        keys.add(opened.grant.key)
    assert {len(key) for key in keys} == {32}
    assert len(keys) == 2


# ---- draft tokens


def test_the_first_token_of_a_step_says_how_many_were_drafted(scene: Scene) -> None:
    scene.prefilling_here(1)
    scene.prefilling_here(2)
    tokens = (token(1, 0), token(1, 1), token(2, 0))
    drafts = (DraftsChecked(f"{SESSION}.1", 3, 1), DraftsChecked(f"{SESSION}.3", 2, 0))
    (command,) = scene.on(StepDone(StepEvents(1, 0.1, tokens=tokens, drafts=drafts)))
    (message,) = sent([command])
    counts = [(each.key, each.drafted_tokens, each.accepted_tokens) for each in message.step.tokens]
    assert counts == [(1, 3, 1), (1, 0, 0), (2, 0, 0)]
