"""The gateway's side of the hand-over of one request, from the choice of its nodes to its last token, top to bottom.

    run                 as often as a decode node is lost: choose another one and go on there
      at                submit, and get a ticket or the word that the decode node prefills the prompt itself
        prefill         give the ticket to a prefill node, and follow it until the decode node has the KV
        ask_again       it failed: a new ticket for another prefill node, or the decode node itself
        decode          tokens until the end

The two nodes speak on different connections, so nothing is assumed of the order in which their words arrive.
"""

import asyncio
from dataclasses import dataclass, field

from baton.config import GatewaySettings
from baton.convert import sampling_to_proto
from baton.errors import BatonError, DataLoss, DeadlineExceeded, InvalidRequest, NoNode, Overloaded
from baton.rpc.status import from_detail
from baton.types import LocalPolicy, SamplingParams
from gateway.cluster import Cluster
from gateway.leg import DecodeRefused, Leg, LegLost, Patience
from gateway.node import DecodeNode, PrefillNode
from gateway.old_receipt import ReceiptDraft
from gateway.old_reply import Finish, Reply
from gateway.prefill_call import PrefillFailed, PrefillSaid
from gateway.router import Wanted
from gateway.tokens import TokenOrder
from protos.baton.v1 import common_pb2, decode_pb2, prefill_pb2

# How long a finished request's receipt may wait for the prefill node's count of what it sent.
_RECEIPT_WAIT_S = 1.0

_POLICIES = {
    LocalPolicy.STRICT: decode_pb2.LOCAL_POLICY_STRICT,
    LocalPolicy.PREFER: decode_pb2.LOCAL_POLICY_PREFER,
    LocalPolicy.LOCAL: decode_pb2.LOCAL_POLICY_LOCAL,
}


@dataclass(frozen=True)
class Request:
    """One checked request; `deadline` is a time of the event loop's clock."""

    request_id: str
    prompt: list[int]
    sampling: SamplingParams
    cache_salt: str
    deadline: float


@dataclass(frozen=True)
class Trouble:
    """A hand-over that failed. `node` is empty when no prefill node could be called at all."""

    node: str
    error: BatonError


@dataclass
class Attempts:
    """Prefill attempts of one leg."""

    failed: int = 0
    last_error: BatonError | None = None
    excluded: set[int] = field(default_factory=set)  # incarnations of prefill nodes


class HandOver:
    """One request on its way through the nodes. `run` once."""

    def __init__(
        self, request: Request, settings: GatewaySettings, cluster: Cluster, reply: Reply, receipt: ReceiptDraft
    ) -> None:
        self._request = request
        self._settings = settings
        self._policy = settings.local_policy
        self._cluster = cluster
        self._reply = reply
        self._receipt = receipt
        self._loop = asyncio.get_running_loop()
        self._order = TokenOrder()
        self._finish: Finish | None = None
        self._model: tuple[str, ...] | None = None
        self._refusals: dict[int, BatonError] = {}  # by decode node's incarnation
        self._losses = 0
        self._patience = Patience(settings.prefill_stall_s, settings.decode_stall_s, settings.queue_s)
        # Stop strings are the gateway's business: nodes see no text.
        self._sampling = sampling_to_proto(request.sampling)
        del self._sampling.stop[:]

    async def run(self) -> Finish:
        """Gives every token to the reply, exactly once and in order.

        Raises:
            BatonError: the request cannot be finished.
        """
        while True:
            node = await self._choose_decode_node()
            num_given = len(self._order.given)
            try:
                return await self._at(node)
            except DecodeRefused as refused:
                self._refusals[node.incarnation] = refused.error
                self._receipt.trouble(f"{node.name} did not take it ({refused.error.message})")
            except LegLost as lost:
                self._losses = 1 if len(self._order.given) > num_given else self._losses + 1
                self._receipt.trouble(f"{node.name} was lost ({lost.reason})")
                if self._losses > self._settings.max_attempts:
                    what = f"{self._losses} decode nodes in a row were lost, the last one {node.name}: {lost.reason}"
                    raise NoNode(what, cure="see the nodes' logs") from lost
            self._order.forget_early()

    async def _choose_decode_node(self) -> DecodeNode:
        """A decode node for the request; one that has begun waits for one, until its deadline.

        Raises:
            BatonError: there is none for a new request, or all have refused it.
        """
        while True:
            changed = self._cluster.changed
            node = self._cluster.pick_decode(self._wanted(Attempts()))
            if node is not None:
                return node
            begun = self._losses > 0 or bool(self._order.given)
            for refusal in self._refusals.values():
                if isinstance(refusal, Overloaded) or not begun:
                    raise refusal
            if not begun:
                cure = "see `baton status`, and try again"
                raise NoNode(f"no node can take the request: {self._cluster.explain()}", cure=cure, retry_after_s=1.0)
            await changed.wait()

    async def _at(self, node: DecodeNode) -> Finish:
        """Serves the request on this decode node to its end.

        Raises:
            LegLost, DecodeRefused: another one must go on.
        """
        attempts = Attempts()
        leg = Leg(node, self._submission(node), self._patience)
        try:
            answer = await self._answer(leg)
            while isinstance(answer, decode_pb2.Reserved):
                trouble = await self._prefill(leg, answer.ticket, attempts)
                if trouble is None:
                    break
                answer = await self._ask_again(leg, trouble, attempts)
            return await self._decode(leg)
        finally:
            leg.close()

    async def _answer(self, leg: Leg) -> decode_pb2.Reserved | decode_pb2.Accepted | decode_pb2.Admitted:
        """The decode node's word on what comes next. It is Admitted when a hand-over that was given up has, meanwhile,
        succeeded after all."""
        while True:
            match await leg.next():
                case decode_pb2.Reserved() as reserved:
                    self._receipt.reserved(leg.node.name, reserved)
                    return reserved
                case decode_pb2.Accepted() as accepted:
                    self._receipt.accepted(leg.node.name, accepted)
                    return accepted
                case decode_pb2.Admitted() as admitted:
                    self._receipt.admitted(admitted)
                    return admitted

    async def _prefill(self, leg: Leg, ticket: common_pb2.Ticket, attempts: Attempts) -> Trouble | None:
        """Has a prefill node serve the ticket; None when the KV is with the decode node, or the output has ended."""
        node = self._pick_prefill(leg, attempts)
        if node is None:
            return Trouble("", NoNode(f"no prefill node is left: {self._cluster.explain()}", retry_after_s=1.0))
        attempts.excluded.add(node.incarnation)  # whatever happens, this ticket is its only one
        pair = node.peers[leg.node.incarnation]
        self._receipt.calling(node.name, pair.transport, pair.kv_converted)
        leg.prefill(node, self._prefill_request(ticket), timeout_s=self._remaining_s)
        while self._finish is None and not leg.admitted:
            match await leg.next():
                case PrefillSaid(event=event):
                    await self._hear(leg, event)
                case PrefillFailed(error=error):
                    return Trouble(node.name, error)
                case decode_pb2.HandOverFailed(error=detail):
                    return Trouble(node.name, from_detail(detail))
                case decode_pb2.Admitted() as admitted:
                    self._receipt.admitted(admitted)
                case decode_pb2.StepToken() as said:
                    await self._give(leg, said)
        return None

    async def _ask_again(
        self, leg: Leg, trouble: Trouble, attempts: Attempts
    ) -> decode_pb2.Reserved | decode_pb2.Accepted | decode_pb2.Admitted:
        """After a failed hand-over: the decode node's next answer.

        Raises:
            BatonError: the failure is the client's doing, or policy strict has nobody left to ask.
        """
        leg.drop_call()
        if isinstance(trouble.error, InvalidRequest | DeadlineExceeded):
            raise trouble.error
        strict = self._policy is LocalPolicy.STRICT
        if trouble.node:
            attempts.failed += 1
            attempts.last_error = trouble.error
            self._receipt.trouble(f"{trouble.node} failed ({trouble.error.message})")
        elif strict:
            raise _nobody_left(trouble, attempts)
        # NOTE: under strict a ticket is asked for even when nobody is left to take it: the prefill node may only have
        # failed because the decode node is gone, and this is how that is found out.
        if strict or self._pick_prefill(leg, attempts) is not None:
            leg.renew(self._order.given)
        else:
            leg.prefill_here(self._order.given)
        return await self._answer(leg)

    async def _decode(self, leg: Leg) -> Finish:
        """Passes tokens on until the output ends."""
        while self._finish is None:
            if leg.first_token_lost:
                raise LegLost("the first token was lost with its prefill node")
            match await leg.next():
                case decode_pb2.StepToken() as said:
                    await self._give(leg, said, *leg.more_tokens())
                case PrefillSaid(event=event):
                    await self._hear(leg, event)
        for event in await leg.until_sent(timeout_s=_RECEIPT_WAIT_S):
            if event.HasField("sent"):
                self._receipt.sent(event.sent)
        return self._finish

    # ---- steps of it

    async def _hear(self, leg: Leg, event: prefill_pb2.PrefillEvent) -> None:
        match event.WhichOneof("event"):
            case "scheduled":
                self._receipt.scheduled(event.scheduled)
            case "first_token":
                first = event.first_token
                self._receipt.prefilled(first.prefill_s)
                said = decode_pb2.StepToken(
                    token=first.token, finish_reason=first.finish_reason, stop_reason=first.stop_reason
                )
                await self._give(leg, said)
            case "sent":
                self._receipt.sent(event.sent)

    async def _give(self, leg: Leg, *tokens: decode_pb2.StepToken) -> None:
        hold = leg.first_token_owed
        due = [token for said in tokens for token in self._order.offer(said, hold=hold)]
        if tokens[0].HasField("prefill_s"):
            self._receipt.prefilled(tokens[0].prefill_s)
        if due:
            self._finish = await self._reply.give(due)

    def _pick_prefill(self, leg: Leg, attempts: Attempts) -> PrefillNode | None:
        """The prefill node for the next attempt; None when attempts or nodes are used up."""
        allowed = {
            LocalPolicy.STRICT: self._settings.max_attempts,
            LocalPolicy.PREFER: max(1, self._settings.max_attempts - 1),  # the last attempt is the decode node's
            LocalPolicy.LOCAL: 0,
        }
        if attempts.failed >= allowed[self._policy]:
            return None
        return self._cluster.pick_prefill(leg.node, self._wanted(attempts))

    def _submission(self, node: DecodeNode) -> decode_pb2.SubmitRequest:
        wanted = self._wanted(Attempts())
        self._model = node.view().model
        node.note_sent(wanted.num_tokens)
        return decode_pb2.SubmitRequest(
            request_id=self._request.request_id,
            prompt_token_ids=self._request.prompt,
            output_token_ids=self._order.given,
            sampling=self._sampling,
            cache_salt=self._request.cache_salt,
            policy=_POLICIES[self._policy],
            prefill_available=self._cluster.pick_prefill(node, wanted) is not None,
            budget_s=self._remaining_s,
            queue_s=min(self._settings.queue_s, self._remaining_s),
        )

    def _prefill_request(self, ticket: common_pb2.Ticket) -> prefill_pb2.PrefillRequest:
        return prefill_pb2.PrefillRequest(
            request_id=self._request.request_id,
            prompt_token_ids=self._request.prompt,
            output_token_ids=self._order.given,
            sampling=self._sampling,
            cache_salt=self._request.cache_salt,
            ticket=ticket,
        )

    def _wanted(self, attempts: Attempts) -> Wanted:
        return Wanted(
            num_tokens=len(self._request.prompt) + len(self._order.given),
            policy=self._policy,
            model=self._model,
            excluded_decode=self._refusals.keys(),
            excluded_prefill=attempts.excluded,
        )

    @property
    def _remaining_s(self) -> float:
        return max(0.0, self._request.deadline - self._loop.time())


def _nobody_left(trouble: Trouble, attempts: Attempts) -> BatonError:
    """The error of a request that no prefill node could serve."""
    last = attempts.last_error
    if last is None or isinstance(last, Overloaded | DataLoss):
        return last or trouble.error
    return NoNode(f"{attempts.failed} prefill attempt(s) failed, the last one: {last}", cure="see the nodes' logs")
