"""Which nodes may serve one request: the router's choice without nodes that refused, failed or lost it. Pure."""

from collections.abc import Set
from dataclasses import replace
from typing import NamedTuple

from baton.core.errors import LOGITS_FIELD, BatonError, DataLoss, InternalError, NoNode, Overloaded
from baton.core.types import NO_SLO, AdapterRef, LocalPolicy, Slo
from baton.gateway.core.prompt_blocks import PromptBlocks
from baton.gateway.core.request import Rules
from baton.gateway.fleet.adapters import nodes_with
from baton.gateway.fleet.fleet import Fleet
from baton.gateway.fleet.fleet_node import FleetNode
from baton.gateway.fleet.placement import Placement, Route
from baton.gateway.fleet.router import RoutedRequest
from baton.gateway.request.attempt import Attempt
from baton.protos.v1 import node_status_pb2
from baton.rpc.revisions import answer_revision

_CURE = "see `baton status`, and try again"
_RETRY_S = 1.0
_RETRY_LOADING_S = 5.0  # a start takes seconds to minutes


class _Refusal(NamedTuple):
    """A node's refusal to decode the request.

    Args:
        ends_a_begun_request: it does not wait for another node. Decode nodes are full then. That a prefill node has no
            room for what it would decode says nothing about them.
    """

    error: BatonError
    ends_a_begun_request: bool


class NodeChoice:
    """The choices of one request, from its first node to its last.

    Args:
        revision: of a part of the answer that the client has; empty: it has none.
        adapter: that every node of the request must have; None: the base model.
    """

    def __init__(
        self,
        rules: Rules,
        fleet: Fleet,
        *,
        prompt: PromptBlocks | None = None,
        session_id: str = "",
        revision: str = "",
        adapter: AdapterRef | None = None,
    ) -> None:
        self._adapter = adapter
        self._fleet = fleet
        self._prompt = prompt
        self._session_id = session_id
        self._policy = rules.local_policy
        # A decode node that prefills itself is the last attempt under `prefer` and `elastic`.
        self._max_calls = {
            LocalPolicy.STRICT: rules.max_attempts,
            LocalPolicy.PREFER: max(1, rules.max_attempts - 1),
            LocalPolicy.ELASTIC: max(1, rules.max_attempts - 1),
            LocalPolicy.LOCAL: 0,
        }[rules.local_policy]
        self._resumed = revision
        self._revision = revision  # that the output's tokens come from; empty while there are none
        self._refusals: dict[int, _Refusal] = {}  # by incarnation
        self._losing: set[int] = set()  # incarnations that the fleet does not know as lost yet

    def decode_node(
        self, num_tokens: int, *, begun: bool, now_s: float, slo: Slo = NO_SLO, splittable: bool = True
    ) -> tuple[FleetNode, Placement] | None:
        """The next node to decode it, and where the prompt is prefilled; None if it must wait for one: because it has
        begun, or because nodes load, or are there and only a pair of them is missing.

        Args:
            num_tokens: prompt and output so far.
            slo: `ttft_s` is the time left.

        Raises:
            BatonError: there is none for a new request, or all have refused it.
        """
        wanted = replace(self._wanted(num_tokens), slo=slo, splittable=splittable)
        placement = self._place(wanted, now_s)
        if placement is not None:
            node = self._fleet.decoding_node(placement.decode)
            self._fleet.breakers.chosen(node.incarnation, now_s)
            return node, placement
        for refusal in self._refusals.values():
            if not begun or refusal.ends_a_begun_request:
                raise refusal.error
        if self._resumed and not self._fleet.may_have(self._resumed, self._adapter):
            begun_with = answer_revision(self._resumed, self._adapter)
            what = "weights" if self._adapter is None else f"weights + adapter {self._adapter.name}"
            raise NoNode(
                f"the client has a part of the answer of revision {begun_with} of the {what}, and no node has them",
                field="revision",
                value=begun_with,
                cure="send the request again from its beginning",
            )
        pairing = self._policy is LocalPolicy.STRICT and self._fleet.pairs_under_way()
        if not begun and not pairing and not self._fleet.nodes_load():
            why = self._fleet.explain()
            if self._adapter is not None:
                why = f"{nodes_with(self._adapter, self._fleet.nodes())}; {why}"
            raise NoNode(f"no node can take the request: {why}", cure=_CURE, retry_after_s=_RETRY_S)
        return None

    def _place(self, wanted: RoutedRequest, now_s: float) -> Placement | None:
        """Without the nodes whose breakers are open, unless there are no others."""
        broken = self._fleet.breakers.open(now_s)
        if broken:
            whole = replace(
                wanted,
                excluded_decode=wanted.excluded_decode | broken,
                excluded_prefill=wanted.excluded_prefill | broken,
            )
            if (placement := self._fleet.place(whole, now_s)) is not None:
                return placement
        return self._fleet.place(wanted, now_s)

    def prefill_node(self, attempt: Attempt, num_tokens: int, now_s: float, slo: Slo = NO_SLO) -> FleetNode | None:
        """The prefill node for the attempt's next call; None if its calls or the nodes are used up."""
        if attempt.failed_calls >= self._max_calls:
            return None
        placed = attempt.ticket_for or attempt.placed_prefill
        wanted = replace(self._wanted(num_tokens, attempt.excluded), slo=slo)
        broken = self._fleet.breakers.open(now_s) - {placed}
        if broken:
            whole = replace(wanted, excluded_prefill=wanted.excluded_prefill | broken)
            if (node := self._fleet.pick_prefill(attempt.node, whole, now_s, placed=placed)) is not None:
                return node
        return self._fleet.pick_prefill(attempt.node, wanted, now_s, placed=placed)

    def note_placed(self, decode: FleetNode, placement: Placement, num_tokens: int, now_s: float) -> int | None:
        """The request is sent to the node that decodes it: counts what the nodes will compute. Returns the incarnation
        of the prefill node that counts a part."""
        decode.note_sent(num_tokens)
        cached = placement.decode.cached_tokens
        here_from = {Route.REMOTE: num_tokens, Route.LOCAL: cached, Route.SPLIT: placement.split_tokens}[placement.way]
        if here_from < num_tokens:
            decode.note_prompt(here_from, num_tokens, now_s)
        if placement.prefill is None:
            return None
        prefill = self._fleet.prefills[placement.prefill.address]
        prefill.note_prompt(placement.prefill.cached_tokens, here_from, now_s)
        return prefill.incarnation

    def no_prefill_node(self) -> NoNode:
        return NoNode(f"no prefill node is left: {self._fleet.explain()}", retry_after_s=1.0)

    def no_decode_node(self, failures: str, waited_s: float) -> NoNode:
        """The error of a request that has waited for a node; `failures` says how it lost others."""
        if not failures and self._fleet.nodes_load():
            return no_node(self._fleet)
        beginning = f"{failures}, and no other node" if failures else "no pair of nodes"
        what = f"{beginning} came within {waited_s:.3g} s: {self._fleet.explain()}"
        return NoNode(what, cure=_CURE, retry_after_s=_RETRY_S)

    def refused(self, node: FleetNode, error: BatonError) -> None:
        """Records that the node refused to decode the request: it is not asked again."""
        full = isinstance(error, Overloaded) and node.role == node_status_pb2.ROLE_DECODE
        self._refusals[node.incarnation] = _Refusal(error, ends_a_begun_request=full)

    def failed(self, node: FleetNode, error: BatonError, now_s: float) -> None:
        """Records why a node's part of the request failed, for the node's circuit breaker.

        Logits that are not finite may come from the prompt: clients with such prompts must not take nodes from others.
        """
        if isinstance(error, InternalError) and error.field != LOGITS_FIELD:
            self._fleet.breakers.failed(node.incarnation, now_s)

    def generated(self, node: FleetNode) -> None:
        """Records that the output has tokens from this node: only nodes of its revision may continue it."""
        self._revision = node.revision

    def answered(self, *nodes: FleetNode) -> None:
        """Records that the nodes have done their parts of the request."""
        for node in nodes:
            self._fleet.breakers.answered(node.incarnation)

    def num_gone(self, incarnations: Set[int]) -> int:
        """How many of these nodes are not reachable now, or are no more."""
        return len(incarnations - {node.incarnation for node in self._fleet.nodes() if node.reachable})

    def losing(self, node: FleetNode) -> None:
        """Records that the node is silent: it is not chosen, even while the fleet still lists it as reachable."""
        self._losing.add(node.incarnation)

    def fleet_is_current(self) -> None:
        """Clears the silent nodes: the fleet has marked them as lost, and may have reached them again since."""
        self._losing.clear()

    def _wanted(self, num_tokens: int, excluded_prefill: Set[int] = frozenset()) -> RoutedRequest:
        return RoutedRequest(
            num_tokens=num_tokens,
            policy=self._policy,
            revision=self._revision,
            adapter=self._adapter,
            excluded_decode=self._refusals.keys() | self._losing,
            excluded_prefill=excluded_prefill | self._losing,
            prompt=self._prompt,
            session_id=self._session_id,
        )


def no_node(fleet: Fleet) -> NoNode:
    """The error of a request for which no node is ready."""
    retry_after_s = _RETRY_LOADING_S if fleet.nodes_load() else _RETRY_S
    return NoNode(f"no node is ready: {fleet.explain()}", cure=_CURE, retry_after_s=retry_after_s)


def prefill_failure(attempt: Attempt, error: BatonError) -> BatonError:
    """The error of a request that no prefill node could serve; `error` says why none is left."""
    last = attempt.last_error
    if last is None or isinstance(last, Overloaded | DataLoss):
        return last or error
    what = f"{attempt.failed_calls} prefill attempt(s) failed, the last one: {last}"
    return NoNode(what, cure="see the nodes' logs")
