"""Sends prompts to prefill nodes for pooling: chooses a node, and another one when a node refuses, fails or is lost."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

from baton.core.errors import (
    LOGITS_FIELD,
    BatonError,
    DataLoss,
    Draining,
    InternalError,
    NoNode,
    Overloaded,
    PeerRefused,
    UnknownModel,
)
from baton.core.types import AdapterRef, LocalPolicy
from baton.gateway.fleet.fleet_node import FleetNode
from baton.gateway.fleet.router import RoutedRequest
from baton.gateway.request.connections import Connections
from baton.gateway.request.node_choice import no_node
from baton.gateway.request.receipt import PREFILL, Retry
from baton.metrics.declared import LOST
from baton.protos.internal.v1 import prefill_pb2 as pb
from baton.protos.v1 import node_status_pb2

# A node that refuses has lost nothing, so another one is asked. After a failure inside a node another one is tried too:
# pooling has no output yet that could differ.
_REFUSALS = (Overloaded, Draining, UnknownModel, PeerRefused)
_FAILURES = (InternalError, DataLoss, NoNode)
_PREFILL = node_status_pb2.ROLE_PREFILL


@dataclass(frozen=True)
class PoolBatch:
    """Prompts that one node computes."""

    request_id: str
    prompts: Sequence[pb.PoolPrompt]
    cache_salt: str
    priority: int
    adapter: AdapterRef | None

    @property
    def num_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    def message(self) -> pb.PoolRequest:
        message = pb.PoolRequest(
            request_id=self.request_id, prompts=self.prompts, cache_salt=self.cache_salt, priority=self.priority
        )
        if self.adapter is not None:
            message.adapter.name, message.adapter.revision = self.adapter.name, self.adapter.revision
        return message


@dataclass(frozen=True)
class PooledBatch:
    """The results of a batch.

    Attributes:
        prompt_tokens: tokens of its prompts.
        node, address, version, revision, revision_name: of the node that computed it.
        called_s, ended_s: begin and end of the attempt that succeeded.
        total_s: from the first attempt to the result.
        failures: what failed before, as text; empty: nothing.
    """

    response: pb.PoolResponse
    prompt_tokens: int
    node: str
    address: str
    version: str
    revision: str
    revision_name: str
    attempts: int
    called_s: float
    ended_s: float
    total_s: float
    retries: Sequence[Retry]
    failures: str

    @property
    def cached_tokens(self) -> int:
        return sum(each.cached_tokens for each in self.response.pooled)


class PoolAttempts:
    """The attempts of one batch: which nodes are left, and what failed. Pure."""

    def __init__(self, max_attempts: int) -> None:
        self.excluded: set[int] = set()
        self.attempts = 0
        self.retries: list[Retry] = []
        self._max_attempts = max_attempts
        self._failed = 0
        self._texts: list[str] = []
        self._last: BatonError | None = None

    @property
    def failures(self) -> str:
        return ", then ".join(self._texts)

    @property
    def last(self) -> BatonError | None:
        """The last error; None: nothing has failed yet."""
        return self._last

    def failed(self, node: str, incarnation: int, error: BatonError, *, lost: bool) -> None:
        """Records a failed attempt.

        Raises:
            BatonError: the error itself, if another node would answer the same, or too many nodes have failed.
        """
        if not isinstance(error, (*_REFUSALS, *_FAILURES)):
            raise error
        self.excluded.add(incarnation)
        self.retries.append(Retry(PREFILL, LOST if lost else error.reason))
        how = "was lost" if lost else "refused it" if isinstance(error, _REFUSALS) else "failed"
        self._texts.append(f"{node} {how} ({error.message})")
        self._last = error
        self._failed += not isinstance(error, _REFUSALS)
        if self._failed >= self._max_attempts:
            raise NoNode(f"{self._failed} prefill node(s) failed: {self.failures}", cure="see the nodes' logs")


class PoolClient:
    """Sends batches to the prefill nodes of one gateway.

    Args:
        max_attempts: most nodes that may fail one batch.
        wait_s: how long a batch waits for another node once one was lost.
    """

    def __init__(self, connections: Connections, *, max_attempts: int, wait_s: float) -> None:
        self._connections = connections
        self._fleet = connections.fleet
        self._max_attempts, self._wait_s = max_attempts, wait_s

    @property
    def num_nodes(self) -> int:
        """Number of nodes that take prompts now."""
        return sum(node.open for node in self._fleet.prefills.values())

    @property
    def step_tokens(self) -> int:
        """Tokens of one step of the node with the smallest steps."""
        return min((node.view().step_tokens for node in self._fleet.prefills.values() if node.open), default=2048)

    async def pool(self, batch: PoolBatch, *, timeout_s: float) -> PooledBatch:
        """Returns the batch's results. Cancel the task to cancel the call.

        Raises:
            BatonError: no node can compute it.
        """
        attempts = PoolAttempts(self._max_attempts)
        started_s = monotonic()
        message = batch.message()
        while True:
            node = await self._choose(batch, attempts)
            client = self._connections.client(_PREFILL, node.address)
            called_s = monotonic()
            left_s = timeout_s - (called_s - started_s)
            name, incarnation = node.name, node.incarnation
            try:
                if client is None:
                    raise Draining(f"{name} is no longer listed")
                attempts.attempts += 1
                response = await client.pool(message, timeout_s=left_s)
            except BatonError as error:
                lost = isinstance(error, NoNode) or not node.reachable or node.incarnation != incarnation
                # States that are not finite do not count: the prompt may cause them.
                if isinstance(error, InternalError) and error.field != LOGITS_FIELD and not lost:
                    self._fleet.breakers.failed(incarnation, monotonic())
                attempts.failed(name, incarnation, error, lost=lost)
                continue
            self._fleet.breakers.answered(incarnation)
            ended_s = monotonic()
            return PooledBatch(
                response,
                prompt_tokens=batch.num_tokens,
                node=name,
                address=node.address,
                version=node.version,
                revision=node.revision,
                revision_name=node.revision_name,
                attempts=attempts.attempts,
                called_s=called_s,
                ended_s=ended_s,
                total_s=ended_s - started_s,
                retries=attempts.retries,
                failures=attempts.failures,
            )

    async def _choose(self, batch: PoolBatch, attempts: PoolAttempts) -> FleetNode:
        """Chooses the next node, and waits for one while nodes are expected or after one was lost.

        Raises:
            BatonError: there is none.
        """
        if (node := self._pick(batch, attempts)) is not None:
            return self._sent(node, batch)
        # Another node would hardly compute finite states, so the request waits for none that may come.
        not_finite = attempts.last is not None and attempts.last.field == LOGITS_FIELD
        waits = attempts.last is None or (isinstance(attempts.last, (*_FAILURES, Draining)) and not not_finite)
        expected = self._fleet.nodes_expected(monotonic(), within_s=self._wait_s, roles=(_PREFILL,))
        if waits and (expected or attempts.last is not None):
            found: list[FleetNode] = []

            def comes() -> bool:
                if (picked := self._pick(batch, attempts)) is not None:
                    found.append(picked)
                return bool(found)

            try:
                async with asyncio.timeout(self._wait_s):
                    await self._connections.until(comes)
            except TimeoutError:
                pass
            if found:
                return self._sent(found[0], batch)
        if attempts.last is not None and (isinstance(attempts.last, _REFUSALS) or not_finite):
            raise attempts.last
        if attempts.last is not None:
            what = f"{attempts.failures}, and no other prefill node is ready"
            raise NoNode(what, cure=self._fleet.cure(_PREFILL), retry_after_s=1.0)
        raise no_node(self._fleet, needs=_PREFILL)

    def _pick(self, batch: PoolBatch, attempts: PoolAttempts) -> FleetNode | None:
        now_s = monotonic()
        longest = max((len(prompt.token_ids) for prompt in batch.prompts), default=0)
        for broken in (self._fleet.breakers.open(now_s), frozenset[int]()):
            wanted = RoutedRequest(
                num_tokens=longest,
                policy=LocalPolicy.ELASTIC,
                adapter=batch.adapter,
                excluded_prefill=attempts.excluded | broken,
            )
            if (node := self._fleet.pick_pooling(wanted, batch.num_tokens, now_s)) is not None:
                return node
        return None

    def _sent(self, node: FleetNode, batch: PoolBatch) -> FleetNode:
        now_s = monotonic()
        self._fleet.breakers.chosen(node.incarnation, now_s)
        node.note_sent(batch.num_tokens, decodes=False)
        for prompt in batch.prompts:
            node.note_prompt(0, len(prompt.token_ids), now_s)
        return node
