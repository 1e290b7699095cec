"""Planted faults: small changes of the real code that the simulation must catch. Each is one sentence and one patch.

A mutant names the storm under which it shows soonest, and how many seeds may pass until it is caught.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from baton.client.resumption import _Amount
from baton.core.errors import BatonError
from baton.engine.scheduling.request_table import RequestTable
from baton.engine.scheduling.state import RequestState
from baton.gateway.fleet.fleet import Fleet
from baton.gateway.fleet.fleet_node import FleetNode, Role
from baton.gateway.fleet.node_table import FleetCommand
from baton.gateway.fleet.placement import Placement, Route
from baton.gateway.request.attempt import Attempt
from baton.gateway.request.attempts import Attempts
from baton.gateway.request.node_messages import NodeMessages
from baton.gateway.request.output import RequestOutput, TokenOrder
from baton.protos.internal.v1 import decode_pb2
from baton.protos.internal.v1.decode_pb2 import SubmitRequest
from baton.protos.v1 import generation_pb2, node_status_pb2
from decode_node.commands import Abort as AbortDecode
from decode_node.commands import CloseLease, PrefillHere
from decode_node.commands import Command as DecodeCommand
from decode_node.decode_task import DecodePhase, DecodeTask
from decode_node.events import Event as DecodeEvent
from decode_node.events import SessionClosed
from decode_node.lease_events import HandedOver, LeaseEvent, LeaseLost
from decode_node.machine import DecodeMachine
from kvtransfer.coverage import Coverage
from kvtransfer.leases import LeaseTable, LeaseTotals
from kvtransfer.refusals import SegmentRefusal
from kvtransfer.segments import Segment, Tag
from prefill_node.commands import Abort as AbortPrefill
from prefill_node.commands import Command as PrefillCommand
from prefill_node.machine import PrefillMachine
from prefill_node.prefill_task import PrefillTask, TaskEvent
from tests.simulation.faults import BUSY_PREFILL_NODES, DECODES, GATEWAY, PREFILLS, USUAL, Storm
from tests.simulation.weather import Weather

_KILLS = Storm({"kill": 1})
_LATE_KILLS = Storm({"kill": 1}, most=6, haste=20.0, targets=DECODES, weather=Weather(late=1.0, late_s=0.3))
_CROWDED = Storm({"kill_gateway": 1, "slow": 2, "cut": 2}, most=6, targets=(GATEWAY, *DECODES), weather=Weather())
_SLOW_PAIRS = Storm({"stall": 3, "cut": 1}, most=5, targets=PREFILLS + DECODES, weather=Weather(damaged=0.1))
_GATEWAY = Storm({"kill_gateway": 1, "cut": 1}, weather=Weather())
_LIARS = Storm({"liar": 1}, most=6, weather=Weather())
_HOSTILE_CLIENTS = Storm({"hostile_client": 1}, most=6, weather=Weather())


@dataclass(frozen=True)
class Mutant:
    """One planted fault.

    Attributes:
        breaks: what the change does, in one sentence.
        plant: patches the real code.
        seeds: the maximum number of seeds until it is caught.
    """

    breaks: str
    plant: Callable[[pytest.MonkeyPatch], None]
    storm: Storm = USUAL
    seeds: int = 400


# ---- kvtransfer


def _no_incarnation_check(patch: pytest.MonkeyPatch) -> None:
    start_scatter = LeaseTable.start_scatter

    def mutated(self: LeaseTable, tag: Tag, segment: Segment, *, group: int | None = None) -> SegmentRefusal | None:
        return start_scatter(self, tag, replace(segment, incarnation=self._incarnation), group=group)

    patch.setattr(LeaseTable, "start_scatter", mutated)


def _duplicates_count_twice(patch: pytest.MonkeyPatch) -> None:
    start_scatter = LeaseTable.start_scatter

    def mutated(self: LeaseTable, tag: Tag, segment: Segment, *, group: int | None = None) -> SegmentRefusal | None:
        refusal = start_scatter(self, tag, segment, group=group)
        if refusal is None:
            self._leases[tag.lease].seen.clear()
        return refusal

    def claim(self: Coverage, layers: range, token_start: int, token_stop: int, heads: range) -> bool:
        return True

    patch.setattr(LeaseTable, "start_scatter", mutated)
    patch.setattr(Coverage, "claim", claim)


def _closed_while_scattering(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: LeaseTable, number: int) -> LeaseTotals | None:
        return self._forget(self._leases[number])

    patch.setattr(LeaseTable, "close", mutated)


# ---- the decode node


def _admits_before_filled(patch: pytest.MonkeyPatch) -> None:
    lease_event = DecodeTask.lease_event

    def mutated(self: DecodeTask, event: LeaseEvent, now_s: float) -> list[DecodeCommand]:
        self._filled = True
        return lease_event(self, event, now_s)

    patch.setattr(DecodeTask, "lease_event", mutated)


def _takes_old_hand_over(patch: pytest.MonkeyPatch) -> None:
    lease_event = DecodeMachine._lease_event

    def mutated(self: DecodeMachine, event: LeaseEvent, now_s: float) -> list[DecodeCommand]:
        if isinstance(event, HandedOver) and event.lease not in self._by_lease and self._by_lease:
            event = replace(event, lease=max(self._by_lease))
        return lease_event(self, event, now_s)

    patch.setattr(DecodeMachine, "_lease_event", mutated)


def _frees_before_lease_closed(patch: pytest.MonkeyPatch) -> None:
    end = DecodeTask._end

    def mutated(self: DecodeTask) -> list[DecodeCommand]:
        commands = end(self)
        closes = any(isinstance(command, CloseLease) for command in commands)
        return [*commands, AbortDecode(self.engine_id)] if closes else commands

    patch.setattr(DecodeTask, "_end", mutated)


def _session_end_leaves_requests(patch: pytest.MonkeyPatch) -> None:
    handle = DecodeMachine.handle

    def mutated(self: DecodeMachine, event: DecodeEvent, now_s: float) -> list[DecodeCommand]:
        return [] if isinstance(event, SessionClosed) else handle(self, event, now_s)

    patch.setattr(DecodeMachine, "handle", mutated)


def _renewal_forgets_tokens(patch: pytest.MonkeyPatch) -> None:
    lease_closed = DecodeTask.lease_closed

    def mutated(self: DecodeTask, totals: LeaseTotals, now_s: float) -> list[DecodeCommand]:
        before = self._request
        commands = lease_closed(self, totals, now_s)
        if self.phase is DecodePhase.EXTENDING:
            self._request = before
        return commands

    patch.setattr(DecodeTask, "lease_closed", mutated)


def _split_counts_a_block_too_many(patch: pytest.MonkeyPatch) -> None:
    admit = DecodeTask._admit

    def mutated(self: DecodeTask, sent: HandedOver, now_s: float) -> DecodeCommand:
        command = admit(self, sent, now_s)
        if isinstance(command, PrefillHere):
            return replace(command, received_tokens=command.received_tokens + self._rules.block_size)
        return command

    patch.setattr(DecodeTask, "_admit", mutated)


def _believes_any_peer(patch: pytest.MonkeyPatch) -> None:
    def mutated(
        self: DecodeMachine, incarnation: int, event: HandedOver | LeaseLost, now_s: float
    ) -> list[DecodeCommand]:
        return self._lease_event(event, now_s)

    patch.setattr(DecodeMachine, "_peer_report", mutated)


def _second_submit_takes_the_place(patch: pytest.MonkeyPatch) -> None:
    submit = DecodeMachine._submit

    def mutated(self: DecodeMachine, session: int, message: SubmitRequest, now_s: float) -> list[DecodeCommand]:
        self._by_key.pop((session, message.key), None)
        return submit(self, session, message, now_s)

    patch.setattr(DecodeMachine, "_submit", mutated)


def _keys_of_all_sessions(patch: pytest.MonkeyPatch) -> None:
    for_key = DecodeMachine._for_key

    def mutated(
        self: DecodeMachine, session: int, key: int, react: Callable[[DecodeTask], list[DecodeCommand]]
    ) -> list[DecodeCommand]:
        others = [each for each, number in self._by_key if number == key]
        return for_key(self, min(others, default=session), key, react)

    patch.setattr(DecodeMachine, "_for_key", mutated)


# ---- the prefill node


def _frees_while_sending(patch: pytest.MonkeyPatch) -> None:
    fail = PrefillTask.fail

    def mutated(self: PrefillTask, error: BatonError) -> list[PrefillCommand]:
        commands = fail(self, error)
        return [*commands, AbortPrefill(self.call)] if commands else []

    patch.setattr(PrefillTask, "fail", mutated)


def _ends_before_sent(patch: pytest.MonkeyPatch) -> None:
    end = PrefillTask._end_if_sent

    def mutated(self: PrefillTask, now_s: float) -> list[PrefillCommand]:
        self._sends.under_way = False
        return end(self, now_s)

    patch.setattr(PrefillTask, "_end_if_sent", mutated)


# ---- the gateway


def _token_twice(patch: pytest.MonkeyPatch) -> None:
    lose = Attempts.lose

    def mutated(self: Attempts, attempt: Attempt, reason: str) -> None:
        del self._state.output.token_ids[-1:]
        lose(self, attempt, reason)

    patch.setattr(Attempts, "lose", mutated)


def _token_dropped(patch: pytest.MonkeyPatch) -> None:
    lose = Attempts.lose

    def mutated(self: Attempts, attempt: Attempt, reason: str) -> None:
        order = self._state.output._order
        early = [order._early[index].token.token_id for index in sorted(order._early)]
        order.token_ids += early or order.token_ids[-1:]
        lose(self, attempt, reason)

    patch.setattr(Attempts, "lose", mutated)


def _continuation_forgets_tokens(patch: pytest.MonkeyPatch) -> None:
    submit = NodeMessages.submit

    def mutated(self: NodeMessages, output: Sequence[int], placement: Placement, **rest: Any) -> SubmitRequest:
        return submit(self, (), placement, **rest)

    patch.setattr(NodeMessages, "submit", mutated)


def _overtaking_token_is_a_gap(patch: pytest.MonkeyPatch) -> None:
    offer = TokenOrder.offer

    def mutated(
        self: TokenOrder, step_tokens: Iterable[decode_pb2.StepToken], *, hold: bool
    ) -> Iterator[decode_pb2.StepToken]:
        return offer(self, step_tokens, hold=False)

    patch.setattr(TokenOrder, "offer", mutated)


def _never_cancels(patch: pytest.MonkeyPatch) -> None:
    leave = Attempts.leave

    def mutated(self: Attempts, attempt: Attempt) -> None:
        attempt.ended_by_node = True
        leave(self, attempt)

    patch.setattr(Attempts, "leave", mutated)


def _keeps_dead_peers(patch: pytest.MonkeyPatch) -> None:
    take_status = FleetNode.take_status

    def mutated(self: FleetNode, status: node_status_pb2.NodeStatus, detail: str, now_s: float) -> None:
        before = self.peers
        take_status(self, status, detail, now_s)
        self.peers = {**before, **self.peers}

    patch.setattr(FleetNode, "take_status", mutated)


def _keeps_sessions_with_prefill_nodes(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: Fleet, role: Role, address: str, reason: str, now_s: float) -> list[FleetCommand]:
        commands = lost(self, role, address, reason, now_s)
        return commands if role == node_status_pb2.ROLE_DECODE else []

    lost = Fleet.lost
    patch.setattr(Fleet, "lost", mutated)


def _hand_over_to_itself(patch: pytest.MonkeyPatch) -> None:
    submit = NodeMessages.submit

    def mutated(self: NodeMessages, output: Sequence[int], placement: Placement, **rest: Any) -> SubmitRequest:
        return submit(self, output, replace(placement, route=Route.REMOTE), **rest)

    patch.setattr(NodeMessages, "submit", mutated)


def _resumed_tokens_come_twice(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: _Amount, message: generation_pb2.GenerateResponse) -> None:
        return

    patch.setattr(_Amount, "drop_from", mutated)


def _resumes_one_token_late(patch: pytest.MonkeyPatch) -> None:
    resume = RequestOutput.resume

    def mutated(self: RequestOutput) -> list[str]:
        self._request = replace(self._request, output=self._request.output[:-1])
        return resume(self)

    patch.setattr(RequestOutput, "resume", mutated)


# ---- a prefill node that also decodes


def _mixes_calls_and_whole_requests(patch: pytest.MonkeyPatch) -> None:
    pass_on = PrefillMachine._pass_on

    def mutated(self: PrefillMachine, request_id: str, event: TaskEvent, now_s: float) -> list[PrefillCommand]:
        return pass_on(self, request_id.partition(".")[0], event, now_s)

    patch.setattr(PrefillMachine, "_pass_on", mutated)


# ---- the engine


def _frees_blocks_of_a_running_step(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: RequestTable, ended: RequestState) -> None:
        self.blocks.end(ended)

    patch.setattr(RequestTable, "_give_back", mutated)


def _scored_prompts_use_the_cache(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RequestState, "reusable_tokens", property(lambda self: self.num_tokens - 1))


MUTANTS: Mapping[str, Mutant] = {
    "no_incarnation_check": Mutant(
        "A segment for an earlier incarnation of a decode node is scattered by the present one.",
        _no_incarnation_check,
        _LATE_KILLS,
        seeds=800,
    ),
    "duplicates_count_twice": Mutant(
        "A segment that arrives twice is scattered twice and counted twice.", _duplicates_count_twice
    ),
    "closed_while_scattering": Mutant(
        "A lease counts as closed while one of its segments is still being scattered.", _closed_while_scattering
    ),
    "admits_before_filled": Mutant(
        "A request is admitted when the prefill node's completion comes, whatever KV is still missing.",
        _admits_before_filled,
    ),
    "takes_old_hand_over": Mutant(
        "The completion of a lease that is over counts for the node's latest lease.",
        _takes_old_hand_over,
        _SLOW_PAIRS,
        seeds=800,
    ),
    "frees_before_lease_closed": Mutant(
        "A request's blocks are freed while its lease is still being closed.", _frees_before_lease_closed
    ),
    "session_end_leaves_requests": Mutant(
        "When a gateway's session ends, its requests stay.", _session_end_leaves_requests, _GATEWAY
    ),
    "renewal_forgets_tokens": Mutant(
        "A new ticket is for the prompt alone, without the tokens that the client has.", _renewal_forgets_tokens
    ),
    "split_counts_a_block_too_many": Mutant(
        "The decode node computes the rest of a split prompt from one block too late.", _split_counts_a_block_too_many
    ),
    "believes_any_peer": Mutant(
        "A prefill node's report counts for a lease that is another one's.", _believes_any_peer, _LIARS
    ),
    "second_submit_takes_the_place": Mutant(
        "A second request under a key in use takes the first one's place.",
        _second_submit_takes_the_place,
        _HOSTILE_CLIENTS,
    ),
    "keys_of_all_sessions": Mutant(
        "A client's message reaches a request of another client with the same key.",
        _keys_of_all_sessions,
        _HOSTILE_CLIENTS,
    ),
    "resumed_tokens_come_twice": Mutant(
        "What a new gateway repeats reaches the client a second time.", _resumed_tokens_come_twice, _GATEWAY
    ),
    "resumes_one_token_late": Mutant(
        "A new gateway forgets the last token that the client has.", _resumes_one_token_late, _GATEWAY
    ),
    "frees_while_sending": Mutant(
        "A prefill node frees the blocks of a call that ends while segments are read from them.", _frees_while_sending
    ),
    "ends_before_sent": Mutant(
        "A prefill node reports everything as sent while the last segments are not.", _ends_before_sent
    ),
    "token_twice": Mutant("After a lost decode node the last token is sent again.", _token_twice),
    "token_dropped": Mutant(
        "After a lost decode node the request continues after a token that the client never got.", _token_dropped
    ),
    "continuation_forgets_tokens": Mutant(
        "After a lost decode node the next one begins without the tokens already sent.", _continuation_forgets_tokens
    ),
    "overtaking_token_is_a_gap": Mutant(
        "A decode node's token that overtakes the prefill node's first token ends the request.",
        _overtaking_token_is_a_gap,
    ),
    "never_cancels": Mutant("A gateway leaves decode nodes without cancelling the request there.", _never_cancels),
    "keeps_dead_peers": Mutant(
        "A gateway keeps counting a prefill node's peers that are gone.", _keeps_dead_peers, _KILLS
    ),
    "keeps_sessions_with_prefill_nodes": Mutant(
        "A gateway that loses a prefill node keeps its session with it, and waits there for whole requests.",
        _keeps_sessions_with_prefill_nodes,
        BUSY_PREFILL_NODES,
    ),
    "hand_over_to_itself": Mutant(
        "A prefill node that shall serve a request alone is asked for a hand-over.", _hand_over_to_itself
    ),
    "mixes_calls_and_whole_requests": Mutant(
        "A prefill node takes the tokens of a request that it decodes for those of a call.",
        _mixes_calls_and_whole_requests,
        BUSY_PREFILL_NODES,
    ),
    "frees_blocks_of_a_running_step": Mutant(
        "An aborted request's blocks are freed while a step still writes to them.",
        _frees_blocks_of_a_running_step,
        _CROWDED,
    ),
    "scored_prompts_use_the_cache": Mutant(
        "A prompt whose logprobs are wanted begins after its cached prefix, which has none.",
        _scored_prompts_use_the_cache,
    ),
}
