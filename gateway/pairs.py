"""Sees to it that every prefill node is paired with every decode node before traffic. Knows no request.

Nodes keep no list of each other: a gateway that sees both asks the prefill node to connect. Asking twice does no harm,
so any number of gateways may do so.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import grpc

from baton.rpc.status import from_rpc_error
from gateway.node import DecodeNode, PrefillNode
from protos.baton.v1 import common_pb2

log = logging.getLogger("baton")

_CONNECT_TIMEOUT_S = 20.0
_RETRY_S_MIN, _RETRY_S_MAX = 0.1, 5.0
_SETTLED = (common_pb2.PEER_PHASE_READY, common_pb2.PEER_PHASE_REFUSED)


@dataclass
class _Attempt:
    """Asking for one pair of incarnations, again and again until it has settled."""

    retry_s: float = _RETRY_S_MIN
    next_at: float = 0.0
    task: asyncio.Task[None] | None = None


@dataclass
class Pairs:
    """All pairs of the nodes that this gateway sees. `close` when done.

    Attributes:
        link_retry_s: how often a link that was too slow is measured anew: it may have been busy.
    """

    prefills: Callable[[], Iterable[PrefillNode]]
    decodes: Callable[[], Iterable[DecodeNode]]
    link_retry_s: float
    _attempts: dict[tuple[int, int], _Attempt] = field(default_factory=dict)
    _told: set[tuple[int, int]] = field(default_factory=set)  # settled, and logged

    def settled(self) -> bool:
        """Whether every pair of reachable nodes is ready or has been refused."""
        return all(_settled(prefill, decode) for prefill, decode in self._reachable())

    def any_ready(self) -> bool:
        return any(
            decode.incarnation in prefill.view().ready_peers
            for prefill, decode in self._reachable()
            if prefill.open and decode.open
        )

    def ask(self, now: float) -> None:
        """Asks for every pair that is not there, unless it was asked for a moment ago."""
        wanted = {(p.incarnation, d.incarnation): (p, d) for p, d in self._reachable()}
        for gone in self._attempts.keys() - wanted.keys():
            self._drop(self._attempts.pop(gone))
        self._told &= wanted.keys()
        for key, (prefill, decode) in wanted.items():
            if _settled(prefill, decode):
                self._tell_once(key, prefill, decode)
                if not _too_slow(prefill.peers[decode.incarnation]):
                    continue
            else:
                self._told.discard(key)
            attempt = self._attempts.setdefault(key, _Attempt())
            if attempt.task is None and now >= attempt.next_at:
                attempt.task = asyncio.create_task(self._connect(attempt, prefill, decode), name="connect")

    async def close(self) -> None:
        tasks = [attempt.task for attempt in self._attempts.values() if attempt.task is not None]
        for attempt in self._attempts.values():
            self._drop(attempt)
        if tasks:
            await asyncio.wait(tasks)

    def _reachable(self) -> list[tuple[PrefillNode, DecodeNode]]:
        decodes = [decode for decode in self.decodes() if decode.reachable]
        return [(prefill, decode) for prefill in self.prefills() if prefill.reachable for decode in decodes]

    async def _connect(self, attempt: _Attempt, prefill: PrefillNode, decode: DecodeNode) -> None:
        pause_s, attempt.retry_s = attempt.retry_s, min(2 * attempt.retry_s, _RETRY_S_MAX)
        try:
            state = await prefill.connect(decode.status.info.address, timeout_s=_CONNECT_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.info("%s could not be asked to connect to %s: %s", prefill.name, decode.name, from_rpc_error(error))
        else:
            if state.phase not in _SETTLED:
                log.info("%s cannot connect to %s yet: %s", prefill.name, decode.name, state.detail)
            if _too_slow(state):
                pause_s = self.link_retry_s
        finally:
            attempt.next_at = asyncio.get_running_loop().time() + pause_s
            attempt.task = None

    def _tell_once(self, key: tuple[int, int], prefill: PrefillNode, decode: DecodeNode) -> None:
        if key in self._told:
            return
        self._told.add(key)
        state = prefill.peers[decode.incarnation]
        if state.phase == common_pb2.PEER_PHASE_READY:
            how = f"{state.transport} at {state.gigabytes_per_s:.1f} GB/s"
            how += f"; KV is converted, {state.kv_converted}" if state.kv_converted else ""
            log.info("%s and %s are paired over %s", prefill.name, decode.name, how)
            return
        log.warning("%s and %s cannot work together:", prefill.name, decode.name)
        for item in state.mismatches:
            log.warning("  %s: %s and %s; %s", item.field, item.ours, item.theirs, item.cure)

    def _drop(self, attempt: _Attempt) -> None:
        if attempt.task is not None:
            attempt.task.cancel()


def _settled(prefill: PrefillNode, decode: DecodeNode) -> bool:
    peer = prefill.peers.get(decode.incarnation)
    return peer is not None and peer.phase in _SETTLED


def _too_slow(peer: common_pb2.PeerState) -> bool:
    """Whether nothing but its link keeps the pair from working."""
    return peer.phase == common_pb2.PEER_PHASE_REFUSED and all(item.field == "link" for item in peer.mismatches)
