"""One request's machine over a small fleet, driven by hand: the nodes' messages in short, the commands by kind."""

from dataclasses import replace
from typing import TypeVar

from baton.core.errors import BatonError
from baton.core.types import NO_SLO, LocalPolicy, Slo
from baton.gateway.core.events import (
    DecodeReplied,
    DecodeReply,
    Event,
    PrefillEnded,
    PrefillReplied,
    SessionLost,
    Started,
    TokensCame,
)
from baton.gateway.request.commands import Command, Finish, LoseNode, Respond
from baton.gateway.request.machine import RequestMachine
from baton.protos.internal.v1 import decode_pb2, lease_pb2, prefill_pb2
from baton.protos.v1 import common_pb2, generation_pb2
from baton.rpc.error_detail import to_detail
from tests.unit.gateway.fleets import SmallFleet, request, rules

AnyCommand = TypeVar("AnyCommand", bound=Command)

LENGTH = common_pb2.FINISH_REASON_LENGTH


class Words:
    """A detokenizer for which each token is a word."""

    held = ""

    def push(self, *token_ids: int) -> str:
        return "".join(f" {token_id}" for token_id in token_ids)

    def finish(self) -> str:
        return ""


def replied(attempt: int, message: DecodeReply | decode_pb2.StepToken) -> Event:
    """The event of one message of the decode node."""
    if isinstance(message, decode_pb2.StepToken):
        return TokensCame(attempt, [message])
    return DecodeReplied(attempt, message)


class Served:
    """One request that has been started."""

    def __init__(
        self,
        *,
        prefills: int = 2,
        decodes: int = 2,
        policy: LocalPolicy = LocalPolicy.PREFER,
        timeout_s: float = 100.0,
        failover_wait_s: float = 20.0,
        also_decode: bool = False,
        slo: Slo = NO_SLO,
        start: bool = True,
    ) -> None:
        self.fleet = SmallFleet(prefills, decodes, policy, also_decode=also_decode)
        settings = rules(policy, failover_wait_s=failover_wait_s)
        self.machine = RequestMachine(replace(request(timeout_s=timeout_s), slo=slo), settings, self.fleet, Words())
        self.now_s = 0.0
        self.commands: list[Command] = []  # all commands so far
        if start:
            self.handle(Started())

    def handle(self, *events: Event, after_s: float = 0.0) -> list[Command]:
        """Gives the machine these events together, `after_s` after the last ones; returns its commands."""
        self.now_s += after_s
        commands = self.machine.handle(events, self.now_s)
        for command in commands:
            if isinstance(command, LoseNode):
                self.fleet.lost(command.role, command.address, command.reason, self.now_s)
        self.commands += commands
        return commands

    def decode(
        self, *messages: DecodeReply | decode_pb2.StepToken, attempt: int = 1, after_s: float = 0.0
    ) -> list[Command]:
        return self.handle(*(replied(attempt, message) for message in messages), after_s=after_s)

    def prefill(self, *replies: prefill_pb2.PrefillEvent, call: int = 1, after_s: float = 0.0) -> list[Command]:
        return self.handle(*(PrefillReplied(call, reply) for reply in replies), after_s=after_s)

    def prefill_ended(self, error: BatonError | None, *, call: int = 1) -> list[Command]:
        return self.handle(PrefillEnded(call, error))

    def session_lost(self, attempt: int = 1) -> list[Command]:
        """Loses a node as the shell does: the fleet is updated first."""
        self.fleet.lose(f"d{min(attempt, len(self.fleet.decodes))}", now_s=self.now_s)
        return self.handle(SessionLost(attempt, "gone"))

    @property
    def messages(self) -> list[generation_pb2.GenerateResponse]:
        return [command.message for command in of(self.commands, Respond)]

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for message in self.messages for token in message.tokens]

    @property
    def receipt(self) -> common_pb2.Receipt:
        return self.messages[-1].receipt

    @property
    def error(self) -> BatonError | None:
        """The error that ended the request, which must have ended."""
        finish = self.commands[-1]
        assert isinstance(finish, Finish)
        return finish.error


def of(commands: list[Command], kind: type[AnyCommand]) -> list[AnyCommand]:
    return [command for command in commands if isinstance(command, kind)]


def only(commands: list[Command], kind: type[AnyCommand]) -> AnyCommand:
    (found,) = of(commands, kind)
    return found


# ---- messages of nodes


def token(
    index: int, finish: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_UNSPECIFIED
) -> decode_pb2.StepToken:
    return decode_pb2.StepToken(token=common_pb2.Token(token_id=100 + index, index=index), finish_reason=finish)


def first_token(
    index: int = 0, finish: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_UNSPECIFIED
) -> prefill_pb2.PrefillEvent:
    first = prefill_pb2.PrefillFirstToken(token=common_pb2.Token(token_id=100 + index, index=index))
    first.finish_reason = finish
    return prefill_pb2.PrefillEvent(first_token=first)


def reserved(lease: int = 1) -> decode_pb2.Reserved:
    return decode_pb2.Reserved(
        ticket=lease_pb2.Ticket(lease=lease_pb2.Lease(number=lease), token_start=0, token_stop=64)
    )


def accepted() -> decode_pb2.Accepted:
    return decode_pb2.Accepted(why="short")


def failed(error: BatonError) -> decode_pb2.Failed:
    return decode_pb2.Failed(error=to_detail(error))


def hand_over_failed(error: BatonError, lease: int = 1) -> decode_pb2.HandOverFailed:
    return decode_pb2.HandOverFailed(lease=lease, error=to_detail(error))


SCHEDULED = prefill_pb2.PrefillEvent(scheduled=prefill_pb2.PrefillScheduled(queue_s=0.25))
PROGRESS = prefill_pb2.PrefillEvent(progress=prefill_pb2.PrefillProgress(computed_tokens=16))
SENT = prefill_pb2.PrefillEvent(sent=prefill_pb2.PrefillSent(tokens_sent=64, bytes_sent=4096, segments=2))
