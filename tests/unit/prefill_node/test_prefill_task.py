"""One call's states: when KV and the hand-over are sent, and how a call that fails ends."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.core.errors import BatonError, Cancelled, DataLoss, Draining, InvalidRequest, NoNode, Overloaded
from baton.core.types import FinishReason, PromptLogprob
from baton.engine.events import PromptScored, RequestFailed, TokensDrafted
from baton.kvcache.spec import KVCacheSpec, KVKind
from baton.protos.internal.v1 import decode_pb2, lease_pb2
from baton.protos.internal.v1 import prefill_pb2 as pb
from baton.protos.v1 import common_pb2
from baton.rpc.convert import prompt_logprobs_from_proto
from baton.rpc.error_detail import from_detail
from prefill_node.commands import Abort, Command, EndCall, Respond, SendKV, SendToPeer, StopSending, Submit
from prefill_node.events import (
    Aborted,
    BecameQuiet,
    CallCancelled,
    Closing,
    EngineRefused,
    Event,
    LeaseEnded,
    PeerFacts,
    PeerLost,
    SendFailed,
    Sent,
    StopFailed,
)
from prefill_node.machine import PrefillMachine
from tests.unit.prefill_node.calls import (
    BLOCKS,
    INCARNATION,
    LAYERS,
    PEER,
    PROMPT,
    SPEC,
    called,
    chunk,
    layers,
    machine,
    play,
    sampled,
    segments_of,
    started,
    step,
    ticket,
)


def kinds(commands: list[Command]) -> list[type[Command]]:
    return [type(command) for command in commands]


def sends(commands: list[Command]) -> list[SendKV]:
    return [command for command in commands if isinstance(command, SendKV)]


def send(commands: list[Command]) -> SendKV:
    (found,) = sends(commands)
    return found


def hand_overs(commands: list[Command]) -> list[decode_pb2.HandOver]:
    messages = [command.message for command in commands if isinstance(command, SendToPeer)]
    return [message.hand_over for message in messages if message.WhichOneof("message") == "hand_over"]


def quiets(commands: list[Command]) -> list[decode_pb2.Quiet]:
    messages = [command.message for command in commands if isinstance(command, SendToPeer)]
    return [message.quiet for message in messages if message.WhichOneof("message") == "quiet"]


def responses(commands: list[Command]) -> list[pb.PrefillEvent]:
    return [command.event for command in commands if isinstance(command, Respond)]


# ---- without failures


def test_a_call_computes_sends_hands_over_frees_and_ends() -> None:
    node = machine()
    (submit,) = node.handle(called(), 0.0)
    assert isinstance(submit, Submit)
    assert (submit.request.request_id, tuple(submit.request.prompt), submit.request.prefill_only) == ("1", PROMPT, True)

    computed = node.handle(step(started(), chunk(8), sampled()), 1.0)
    assert kinds(computed) == [Respond, SendKV, Respond, Respond, SendToPeer]
    assert [event.WhichOneof("event") for event in responses(computed)] == ["scheduled", "progress", "first_token"]
    (message,) = hand_overs(computed)
    assert (message.lease, message.first_token.token_id) == (5, 42)

    is_sent = node.handle(Sent(1, segments_of(send(computed).job)), 2.0)
    assert kinds(is_sent) == [Respond, Abort]
    assert [event.WhichOneof("event") for event in responses(is_sent)] == ["sent"]

    assert node.busy
    assert node.handle(Aborted(1), 3.0) == [EndCall(1, None)]
    assert not node.busy


def test_the_engine_gets_the_settings_of_the_gateway_and_the_peer() -> None:
    grouped = called(layers_per_group=1)
    grouped.request.output_token_ids.extend([1, 2])
    grouped.request.ticket.token_stop = len(PROMPT) + 2
    (submit,) = play(machine(), grouped)
    assert isinstance(submit, Submit)
    assert (submit.request.output, submit.request.cache_salt) == ((1, 2), "salt")
    assert (submit.request.layers_per_group, submit.request.decode_context_tokens) == (1, PEER.max_context_tokens)


def test_chunks_whose_layers_are_sent_together_are_reported_whole() -> None:
    (submit,) = play(machine(), called(layers_per_group=LAYERS))
    assert isinstance(submit, Submit)
    assert submit.request.layers_per_group == 0


def test_a_job_names_lease_incarnation_tokens_layers_and_blocks() -> None:
    granted = ticket(9, token_start=2, resume_at=3)
    job = send(play(machine(), called(1, granted), step(chunk(8)))).job
    assert (job.peer, job.sender_number, job.lease, job.incarnation) == (64, 7, 9, INCARNATION)
    assert (job.token_start, job.token_stop, job.resume_at) == (2, 8, 3)
    assert (job.layers, job.block_ids, job.first_segment) == (range(LAYERS), BLOCKS, 0)


def test_only_one_job_is_under_way_and_kv_computed_meanwhile_is_sent_together() -> None:
    node = machine()
    first = send(play(node, called(), step(chunk(2)))).job
    assert sends(play(node, step(chunk(4)), step(chunk(6)))) == []
    second = send(play(node, Sent(1, segments_of(first)))).job
    assert (second.token_start, second.token_stop) == (2, 6)


def test_first_layers_are_sent_while_the_others_compute() -> None:
    node = machine()
    first = send(play(node, called(layers_per_group=2), step(layers(8, 2)))).job
    assert first.layers == range(2)
    computed = play(node, step(chunk(8), sampled()))
    assert sends(computed) == []
    (message,) = hand_overs(computed)
    assert message.lease == 5
    second = send(play(node, Sent(1, segments_of(first)))).job
    assert second.layers == range(2, LAYERS)
    assert kinds(play(node, Sent(1, segments_of(second)))) == [Respond, Abort]


def test_layers_at_different_tokens_are_sent_one_job_after_the_other() -> None:
    node = machine()
    first = send(play(node, called(layers_per_group=1), step(layers(4, 1)))).job
    play(node, step(chunk(4)), step(layers(8, 1)))
    second = send(play(node, Sent(1, segments_of(first)))).job
    third = send(play(node, Sent(1, segments_of(second)))).job
    assert [(job.layers, job.token_start, job.token_stop) for job in (second, third)] == [
        (range(1), 4, 8),
        (range(1, LAYERS), 0, 4),
    ]


def test_drafts_go_to_the_decode_node_with_the_first_token() -> None:
    node = machine()
    (message,) = hand_overs(play(node, called(), step(chunk(8), sampled(), TokensDrafted("1", (7, 9)))))
    assert list(message.guesses) == [7, 9]


def test_a_state_is_sent_last_from_the_slot_of_the_last_chunk() -> None:
    state = KVCacheSpec(KVKind.STATE, 2, num_kv_heads=2, head_dim=5, dtype="float32")
    node = machine(replace(SPEC, state=state))
    first = send(play(node, called(), step(replace(chunk(4), state_slot=6)))).job
    assert (first.layers, first.state_slot) == (range(LAYERS), -1)
    play(node, step(replace(chunk(8), state_slot=3), sampled()))
    second = send(play(node, Sent(1, segments_of(first)))).job
    assert second.layers == range(LAYERS)
    third = send(play(node, Sent(1, segments_of(second)))).job
    assert (third.layers, third.token_start, third.token_stop) == (range(LAYERS, LAYERS + 2), 7, 8)
    assert third.state_slot == 3
    assert kinds(play(node, Sent(1, segments_of(third)))) == [Respond, Abort]


def test_segment_numbers_continue() -> None:
    node = machine()
    first = send(play(node, called(), step(chunk(4)))).job
    second = send(play(node, Sent(1, segments_of(first, pieces=3)), step(chunk(8)))).job
    assert second.first_segment == 3


def test_the_hand_over_waits_for_no_segment_but_the_end_of_the_call_does() -> None:
    node = machine()
    first = send(play(node, called(), step(chunk(4)))).job
    assert len(hand_overs(play(node, step(chunk(8), sampled())))) == 1
    after_first = play(node, Sent(1, segments_of(first)))
    assert kinds(after_first) == [SendKV]
    assert kinds(play(node, Sent(1, segments_of(send(after_first).job)))) == [Respond, Abort]


def test_the_hand_over_of_a_request_that_ends_with_its_first_token_comes_after_every_segment() -> None:
    node = machine()
    computed = play(node, called(), step(chunk(8), sampled(finish_reason=FinishReason.STOP)))
    assert hand_overs(computed) == []
    assert kinds(play(node, Sent(1, segments_of(send(computed).job)))) == [SendToPeer, Respond, Abort]


def test_a_send_that_fails_after_the_hand_over_is_reported_to_the_decode_node() -> None:
    node = machine()
    assert len(hand_overs(play(node, called(), step(chunk(8), sampled())))) == 1
    assert kinds(play(node, SendFailed(1, DataLoss("the link failed")))) == [StopSending]
    stopped = play(node, BecameQuiet(1))
    (quiet,) = quiets(stopped)
    assert (quiet.lease, quiet.HasField("error"), hand_overs(stopped)) == (5, True, [])


def test_no_hand_over_before_the_first_token_is_sampled() -> None:
    node = machine()
    job = send(play(node, called(), step(chunk(8)))).job
    assert hand_overs(play(node, Sent(1, segments_of(job)))) == []
    assert kinds(play(node, step(sampled()))) == [Respond, SendToPeer, Respond, Abort]


def test_tokens_that_the_decode_node_has_are_not_sent() -> None:
    node = machine()
    granted = ticket(token_start=6)
    assert sends(play(node, called(1, granted), step(chunk(6)))) == []
    job = send(play(node, step(chunk(8), sampled()))).job
    assert (job.token_start, job.token_stop) == (6, 8)


# ---- the content of responses


def test_the_times_of_a_call_are_reported() -> None:
    node = machine()
    node.handle(called(), 10.0)
    computed = node.handle(step(started(cached_tokens=3, queue_s=0.5), chunk(8), sampled()), 12.0)
    scheduled, _, first_token = responses(computed)
    assert (scheduled.scheduled.queue_s, scheduled.scheduled.cached_tokens) == (0.5, 3)
    assert first_token.first_token.prefill_s == 1.5, "from the start of the first step to the sampling"
    (message,) = hand_overs(computed)
    assert message.sampled_ago_s == 0.0


def test_a_start_that_was_not_reported_counts_from_the_submission() -> None:
    node = machine()
    node.handle(called(), 10.0)
    first_token = responses(node.handle(step(chunk(8), sampled()), 13.0))[-1]
    assert first_token.first_token.prefill_s == 3.0


def test_progress_counts_computed_tokens() -> None:
    commands = play(machine(), called(), step(chunk(2)), step(chunk(5)))
    assert [event.progress.computed_tokens for event in responses(commands)] == [2, 5]


def test_a_first_token_that_is_also_the_last_has_the_reason() -> None:
    node = machine()
    computed = play(node, called(), step(chunk(8), sampled(finish_reason=FinishReason.LENGTH)))
    assert responses(computed)[-1].first_token.finish_reason == common_pb2.FINISH_REASON_LENGTH
    (message,) = hand_overs(play(node, Sent(1, segments_of(send(computed).job))))
    assert message.finish_reason == common_pb2.FINISH_REASON_LENGTH


def test_the_sent_event_has_the_totals_of_the_call() -> None:
    node = machine()
    peer = PeerFacts(64, 7, transport="cuda_ipc", kv_converted="bfloat16 to fp8", max_context_tokens=None)
    first = send(play(node, called(1, ticket(token_start=2), peer=peer, layers_per_group=3), step(chunk(4)))).job
    sent = play(node, Sent(1, segments_of(first)), step(chunk(8), sampled()))
    last = play(node, Sent(1, segments_of(send(sent).job, pieces=2)))
    (event,) = responses(last)
    assert event.sent == pb.PrefillSent(
        tokens_sent=6,
        bytes_sent=10 * LAYERS * 6,
        segments=3,
        transport="cuda_ipc",
        segment_bytes=10 * LAYERS * 2,
        kv_converted="bfloat16 to fp8",
        layer_groups=2,
    )


# ---- failures and cancellations: the rows of the design's table that this side sees

GATEWAY_CANCELS = CallCancelled(1)
LEASE_IS_TAKEN_BACK = LeaseEnded(PEER.number, 5)
PEER_IS_LOST = PeerLost(PEER.number, NoNode("decode-0 is gone"))
PROCESS_ENDS = Closing()
ENGINE_IS_FULL = EngineRefused(1, Overloaded("no room", retry_after_s=2.0))
STEP_FAILED = step(RequestFailed("1", Cancelled("the engine is closing")))
LINK_FAILED = SendFailed(1, DataLoss("the link to the peer was closed"))

FAILURES: dict[str, tuple[Event, type[BatonError]]] = {
    "client cancels, or its gateway dies": (GATEWAY_CANCELS, Cancelled),
    "decode node takes the lease back": (LEASE_IS_TAKEN_BACK, Cancelled),
    "decode node dies": (PEER_IS_LOST, NoNode),
    "drain out of time": (PROCESS_ENDS, Draining),
    "engine overloaded": (ENGINE_IS_FULL, Overloaded),
    "engine step failed": (STEP_FAILED, Cancelled),
    "link failed": (LINK_FAILED, DataLoss),
}


def waiting() -> PrefillMachine:
    """The call waits for its first step."""
    node = machine()
    play(node, called())
    return node


def sending() -> PrefillMachine:
    """A job is under way while the next chunk computes."""
    node = waiting()
    play(node, step(started(), chunk(4)))
    return node


def sampled_and_sending() -> PrefillMachine:
    """The gateway has the first token; the last job is under way."""
    node = waiting()
    play(node, step(started(), chunk(8), sampled()))
    return node


@pytest.mark.parametrize("moment", [waiting, sending, sampled_and_sending])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_call_that_fails_stops_becomes_quiet_reports_frees_and_ends(
    failure: str, moment: Callable[[], PrefillMachine]
) -> None:
    node = moment()
    event, error_type = FAILURES[failure]
    assert play(node, event) == [StopSending(1, PEER.number, 5)]

    quiet = play(node, BecameQuiet(1))
    assert kinds(quiet) == [SendToPeer, Abort]
    (message,) = quiets(quiet)
    assert message.lease == 5
    assert type(from_detail(message.error)) is error_type

    (end,) = play(node, Aborted(1))
    assert isinstance(end, EndCall)
    assert type(end.error) is error_type
    assert not node.busy


@pytest.mark.parametrize("second", FAILURES)
def test_a_call_that_is_ending_keeps_its_error(second: str) -> None:
    node = sending()
    play(node, PEER_IS_LOST)
    assert play(node, FAILURES[second][0]) == []
    play(node, BecameQuiet(1))
    assert play(node, FAILURES[second][0]) == []
    (end,) = play(node, Aborted(1))
    assert isinstance(end, EndCall)
    assert isinstance(end.error, NoNode)


@pytest.mark.parametrize("late", FAILURES)
def test_once_everything_is_sent_no_event_fails_a_call(late: str) -> None:
    node = machine()
    job = send(play(node, called(), step(chunk(8), sampled()))).job
    play(node, Sent(1, segments_of(job)))
    assert play(node, FAILURES[late][0]) == []
    assert play(node, Aborted(1)) == [EndCall(1, None)]


@pytest.mark.parametrize("late", FAILURES)
def test_after_the_end_of_a_call_its_events_are_ignored(late: str) -> None:
    node = sending()
    play(node, PEER_IS_LOST, BecameQuiet(1), Aborted(1))
    assert play(node, FAILURES[late][0], step(chunk(8), sampled()), BecameQuiet(1), Aborted(1)) == []


def test_a_stopped_call_computes_and_sends_nothing_more() -> None:
    node = sending()
    job = send(play(sending(), Sent(1, ()), step(chunk(8)))).job
    play(node, GATEWAY_CANCELS)
    assert play(node, step(chunk(8), sampled()), Sent(1, segments_of(job)), LINK_FAILED) == []
    play(node, BecameQuiet(1))
    assert play(node, step(chunk(8), sampled()), Sent(1, segments_of(job)), LINK_FAILED) == []


def test_blocks_stay_held_when_the_transfer_ends_before_it_reports_quiet() -> None:
    node = sending()
    play(node, GATEWAY_CANCELS)
    error = Draining("the transfer has ended")
    assert play(node, StopFailed(1, error)) == [EndCall(1, error)]
    assert not node.busy


def test_an_overloaded_engines_hint_reaches_both_ends() -> None:
    node = waiting()
    (message,) = quiets(play(node, ENGINE_IS_FULL, BecameQuiet(1)))
    assert message.error.retry_after_s == 2.0
    (end,) = play(node, Aborted(1))
    assert isinstance(end, EndCall)
    assert end.error is not None
    assert end.error.retry_after_s == 2.0


@pytest.mark.parametrize(
    ("granted", "field"),
    [
        (ticket(1 << 63), "ticket.lease.number"),
        (ticket(key=bytes(65)), "ticket.lease.key"),
        (ticket(token_stop=7), "ticket"),
        (ticket(token_stop=9), "ticket"),
        (ticket(token_start=8, resume_at=8), "ticket"),
        (ticket(token_start=4, resume_at=3), "ticket"),
        (ticket(token_start=4, resume_at=9), "ticket"),
    ],
)
def test_a_ticket_that_does_not_fit_the_prompt_is_refused_and_its_lease_reported_quiet(
    granted: lease_pb2.Ticket, field: str
) -> None:
    node = machine()
    assert play(node, called(1, granted)) == [StopSending(1, PEER.number, granted.lease.number)]
    (message,) = quiets(play(node, BecameQuiet(1)))
    assert message.error.field == field
    (end,) = play(node, Aborted(1))
    assert isinstance(end, EndCall)
    assert isinstance(end.error, InvalidRequest)


def test_the_highest_lease_number_is_taken() -> None:
    assert kinds(play(machine(), called(1, ticket((1 << 36) - 1)))) == [Submit]


def _wrong_temperature(request: pb.PrefillRequest) -> None:
    request.sampling.temperature = -1.0


def _wrong_wait(request: pb.PrefillRequest) -> None:
    request.waited_s = float("inf")


def _wrong_budget(request: pb.PrefillRequest) -> None:
    request.ttft_budget_s = float("nan")


@pytest.mark.parametrize("spoil", [_wrong_temperature, _wrong_wait, _wrong_budget])
def test_a_parameter_out_of_range_ends_the_call_at_once(spoil: Callable[[pb.PrefillRequest], None]) -> None:
    wrong = called()
    spoil(wrong.request)
    node = machine()
    (end,) = play(node, wrong)
    assert isinstance(end, EndCall)
    assert isinstance(end.error, InvalidRequest)
    assert not node.busy


def test_the_first_token_has_the_prompt_logprobs() -> None:
    scored = PromptScored("1", tuple(PromptLogprob(token_id, -0.5, ((3, -0.25),)) for token_id in PROMPT))
    node = machine()
    *_, first_token = responses(play(node, called(), step(chunk(8), sampled(), scored)))
    assert prompt_logprobs_from_proto(first_token.first_token.prompt_logprobs) == scored.logprobs


def test_the_engine_gets_the_priority() -> None:
    asked = called()
    asked.request.priority = -3
    (submit,) = play(machine(), asked)
    assert isinstance(submit, Submit)
    assert submit.request.priority == -3


def test_a_prompt_computed_from_its_start_is_sent_from_the_ticket_s_start() -> None:
    node = machine()
    commands = play(node, called(1, ticket(token_start=6)), step(started(), chunk(4)))
    assert sends(commands) == []
    job = send(play(node, step(chunk(8), sampled()))).job
    assert (job.token_start, job.token_stop) == (6, 8)


# ---- the first part of a split prompt


def test_a_first_part_is_computed_and_handed_over_without_a_token() -> None:
    node = machine()
    granted = ticket(token_stop=4)
    granted.first_part = True
    split = called(1, granted)
    split.request.sampling.prompt_logprobs = 2
    split.request.ttft_budget_s, split.request.refuse_late = 0.5, True
    (submit,) = node.handle(split, 10.0)
    assert isinstance(submit, Submit)
    assert (submit.request.stop_tokens, submit.request.due_s, submit.request.refuse_late) == (4, 10.5, True)
    assert submit.request.sampling.prompt_logprobs is None
    computed = node.handle(step(started(queue_s=1.0), chunk(4)), 13.0)
    assert [event.WhichOneof("event") for event in responses(computed)] == ["scheduled", "progress"]
    (message,) = hand_overs(computed)
    assert (message.HasField("first_token"), message.sampled_ago_s) == (False, 0.0)
    is_sent = node.handle(Sent(1, segments_of(send(computed).job)), 13.5)
    assert kinds(is_sent) == [Respond, Abort]
    (sent,) = responses(is_sent)
    assert (sent.sent.tokens_sent, sent.sent.prefill_s) == (4, 2.0)


def test_a_first_part_must_leave_something_to_the_decode_node() -> None:
    granted = ticket()
    granted.first_part = True
    assert kinds(play(machine(), called(1, granted))) == [StopSending]
