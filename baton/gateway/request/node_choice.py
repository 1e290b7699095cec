"""Chooses nodes for one request: the router's choice without nodes that refused, failed or lost it. Pure."""

from collections.abc import Set
from dataclasses import replace
from typing import NamedTuple

from baton.core.errors import LOGITS_FIELD, BatonError, DataLoss, Draining, InternalError, NoNode, Overloaded
from baton.core.kv_entries import KeptPrefix
from baton.core.types import NO_SLO, AdapterRef, LocalPolicy, Path, Slo
from baton.gateway.core.prompt_blocks import PromptBlocks
from baton.gateway.core.request import Rules
from baton.gateway.fleet.adapters import nodes_with
from baton.gateway.fleet.fleet import Fleet
from baton.gateway.fleet.fleet_node import FleetNode, Role
from baton.gateway.fleet.placement import Placement, Route
from baton.gateway.fleet.router import RoutedRequest
from baton.gateway.request.attempt import Attempt
from baton.protos.v1 import node_status_pb2
from baton.rpc.revisions import answer_revision

_RETRY_S = 1.0
_RETRY_LOADING_S = 5.0  # a start takes seconds to minutes


class _Refusal(NamedTuple):
    """A node's refusal to decode the request.

    Args:
        ends_a_begun_request: whether a begun request fails instead of waiting for another node. True if a decode node
            is full; a full prefill node says nothing about the decode nodes.
    """

    error: BatonError
    ends_a_begun_request: bool


class NodeChoice:
    """The choices of one request, from its first node to its last.

    Args:
        prompt: block numbers of the prompt; None: the request must not use a prefix cache.
        revision: revision of the part of the answer that the client already has; empty: it has none.
        adapter: adapter that every node of the request must have; None: the base model.
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
        self._policy, self._objective = rules.local_policy, rules.objective
        self._wait_s = rules.failover_wait_s
        # Under `prefer` and `elastic`, the last attempt is a prefill on the decode node.
        self._max_calls = {
            LocalPolicy.STRICT: rules.max_attempts,
            LocalPolicy.PREFER: max(1, rules.max_attempts - 1),
            LocalPolicy.ELASTIC: max(1, rules.max_attempts - 1),
            LocalPolicy.LOCAL: 0,
        }[rules.local_policy]
        self._resumed_revision = revision
        self._revision = revision  # revision of the output's tokens; empty while there are none
        self._refusals: dict[int, _Refusal] = {}  # by incarnation
        self._silent: set[int] = set()  # incarnations that the fleet has not marked as lost yet

    def decode_node(
        self, num_tokens: int, *, begun: bool, now_s: float, slo: Slo = NO_SLO, splittable: bool = True
    ) -> tuple[FleetNode, Placement] | None:
        """Chooses the next node to decode the request, and where the prompt is prefilled.

        Returns None if the request must wait for a node: it has begun, or nodes or pairs are expected.

        Args:
            num_tokens: length of prompt and output so far.
            slo: bounds of the request; `ttft_s` is the time left.

        Raises:
            BatonError: there is no node for a new request, or all nodes have refused it.
        """
        wanted = replace(self._routed(num_tokens), slo=slo, splittable=splittable)
        placement = self._place(wanted, now_s)
        if placement is not None:
            node = self._fleet.decoding_node(placement.decode)
            self._fleet.breakers.chosen(node.incarnation, now_s)
            return node, placement
        drains = False
        for refusal in self._refusals.values():
            if isinstance(refusal.error, Draining):
                drains = True  # the node may restart
            elif not begun or refusal.ends_a_begun_request:
                raise refusal.error
        if self._resumed_revision and not self._fleet.may_have(self._resumed_revision, self._adapter):
            begun_with = answer_revision(self._resumed_revision, self._adapter)
            what = "weights" if self._adapter is None else f"weights + adapter {self._adapter.name}"
            raise NoNode(
                f"the answer began with revision {begun_with} of the {what}, which no node has any more",
                field="revision",
                value=begun_with,
                cure="send the request again from its beginning",
            )
        pairing = self._policy is LocalPolicy.STRICT and self._fleet.pairs_under_way()
        expected = drains or pairing or self._fleet.nodes_expected(now_s, within_s=self._wait_s)
        if not begun and not expected:
            why = self._fleet.explain()
            if self._adapter is not None:
                why = f"{nodes_with(self._adapter, self._fleet.nodes())}; {why}"
            raise NoNode(f"no node can take the request: {why}", cure=self._fleet.cure(), retry_after_s=_RETRY_S)
        return None

    def _place(self, wanted: RoutedRequest, now_s: float) -> Placement | None:
        """Places the request, avoiding nodes with open breakers unless there are no others."""
        broken = self._fleet.breakers.open(now_s)
        if broken:
            without_broken = replace(
                wanted,
                excluded_decode=wanted.excluded_decode | broken,
                excluded_prefill=wanted.excluded_prefill | broken,
            )
            if (placement := self._fleet.place(without_broken, now_s)) is not None:
                return placement
        return self._fleet.place(wanted, now_s)

    def prefill_node(self, attempt: Attempt, num_tokens: int, now_s: float, slo: Slo = NO_SLO) -> FleetNode | None:
        """Chooses the prefill node for the attempt's next call. Returns None if no node or no further call is left."""
        if attempt.failed_calls >= self._max_calls:
            return None
        placed = attempt.ticket_for or attempt.placed_prefill
        wanted = replace(self._routed(num_tokens, attempt.excluded), slo=slo)
        broken = self._fleet.breakers.open(now_s) - {placed}
        if broken:
            without_broken = replace(wanted, excluded_prefill=wanted.excluded_prefill | broken)
            if (node := self._fleet.pick_prefill(attempt.node, without_broken, now_s, placed=placed)) is not None:
                return node
        return self._fleet.pick_prefill(attempt.node, wanted, now_s, placed=placed)

    def kept_elsewhere(self, node: FleetNode, num_tokens: int) -> KeptPrefix | None:
        """The node that has much more of the sequence than this one, which is to compute it; None: there is none."""
        return self._fleet.kept_elsewhere(node, self._routed(num_tokens))

    def note_placed(self, decode: FleetNode, placement: Placement, num_tokens: int, now_s: float) -> int | None:
        """Adds a placed request to the backlogs of its nodes.

        Returns the incarnation of the prefill node whose backlog now has a part of it, or None.
        """
        decode.note_sent(num_tokens)
        cached = placement.decode.cached_tokens
        here_from = {Route.REMOTE: num_tokens, Route.LOCAL: cached, Route.SPLIT: placement.split_tokens}[
            placement.route
        ]
        if here_from < num_tokens:
            decode.note_prompt(here_from, num_tokens, now_s)
        if placement.prefill is None:
            return None
        prefill = self._fleet.prefills[placement.prefill.address]
        prefill.note_prompt(placement.prefill.cached_tokens, here_from, now_s)
        return prefill.incarnation

    def serves(self) -> bool:
        """Whether nodes serve requests now."""
        return self._fleet.serves()

    def no_prefill_node(self) -> NoNode:
        what = f"no prefill node is left: {self._fleet.explain()}"
        return NoNode(what, cure=self._fleet.cure(), retry_after_s=_RETRY_S)

    def no_decode_node(self, failures: str, waited_s: float) -> NoNode:
        """The error of a request that has waited for a node; `failures` lists its failures so far."""
        if not failures and self._fleet.nodes_load():
            return no_node(self._fleet)
        beginning = f"{failures}, and no other node" if failures else "no pair of nodes"
        what = f"{beginning} came within {waited_s:.3g} s: {self._fleet.explain()}"
        return NoNode(what, cure=self._fleet.cure(), retry_after_s=_RETRY_S)

    def refused(self, node: FleetNode, error: BatonError) -> None:
        """Records that the node refused to decode the request, so that it is not chosen again."""
        full = isinstance(error, Overloaded) and node.role == node_status_pb2.ROLE_DECODE
        self._refusals[node.incarnation] = _Refusal(error, ends_a_begun_request=full)

    def failed(self, node: FleetNode, error: BatonError, now_s: float) -> None:
        """Records a failure inside a node for its circuit breaker.

        Non-finite logits do not count: the prompt may cause them, and such prompts must not open breakers for others.
        """
        if isinstance(error, InternalError) and error.field != LOGITS_FIELD:
            self._fleet.breakers.failed(node.incarnation, now_s)

    def generated(self, node: FleetNode) -> None:
        """Records that the output has tokens from this node. Only nodes of the same revision may continue it."""
        self._revision = node.revision

    def answered(self, *nodes: FleetNode) -> None:
        """Records that the nodes have done their parts of the request."""
        for node in nodes:
            self._fleet.breakers.answered(node.incarnation)

    def learn(self, path: Path, *, predicted_s: float, ttft_s: float, now_s: float) -> None:
        """Records when the first token of a request came, and when its nodes alone were predicted to compute it."""
        self._fleet.overheads.add(remote=path is not Path.LOCAL, predicted_s=predicted_s, ttft_s=ttft_s, now_s=now_s)

    def num_unreachable(self, incarnations: Set[int]) -> int:
        """Number of these nodes that are unreachable or removed."""
        return len(incarnations - {node.incarnation for node in self._fleet.nodes() if node.reachable})

    def mark_silent(self, node: FleetNode) -> None:
        """Excludes a silent node, even while the fleet still lists it as reachable."""
        self._silent.add(node.incarnation)

    def clear_silent(self) -> None:
        """Clears the silent nodes. Call it when the fleet has marked them as lost."""
        self._silent.clear()

    def _routed(self, num_tokens: int, excluded_prefill: Set[int] = frozenset()) -> RoutedRequest:
        return RoutedRequest(
            num_tokens=num_tokens,
            policy=self._policy,
            revision=self._revision,
            adapter=self._adapter,
            excluded_decode=self._refusals.keys() | self._silent,
            excluded_prefill=excluded_prefill | self._silent,
            objective=self._objective,
            prompt=self._prompt,
            session_id=self._session_id,
        )


def no_node(fleet: Fleet, *, needs: Role | None = None) -> NoNode:
    """The error of a request for which no node is ready; `needs`: a role without which it cannot be served."""
    retry_after_s = _RETRY_LOADING_S if fleet.nodes_load() else _RETRY_S
    return NoNode(f"no node is ready: {fleet.explain(needs)}", cure=fleet.cure(needs), retry_after_s=retry_after_s)


def prefill_failure(attempt: Attempt, error: BatonError) -> BatonError:
    """The error of a request that no prefill node could serve; `error` is the reason why none is left."""
    last = attempt.last_error
    if last is None or isinstance(last, Overloaded | DataLoss):
        return last or error
    what = f"{attempt.failed_calls} prefill attempt(s) failed, the last one: {last}"
    return NoNode(what, cure="see the nodes' logs")
