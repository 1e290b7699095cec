"""Decides when to ask which prefill node to connect to which decode node. Pure: no clock, task or socket.

Nodes keep no list of each other: a gateway that sees both asks the prefill node to connect to the decode node before
there is traffic. `baton.gateway.fleet.pair_choice` says which pairs these are. Repeated requests have no effect, so any
number of gateways may ask.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from numpy.random import Generator, default_rng

from baton.core.errors import BatonError
from baton.gateway.fleet.fleet import Fleet
from baton.gateway.fleet.fleet_node import FleetNode, settled
from baton.gateway.fleet.node_report import SETTLED, too_slow
from baton.gateway.fleet.node_table import LogLine
from baton.protos.v1 import node_status_pb2

_RETRY_S_MIN, _RETRY_S_MAX = 0.1, 5.0
# Requests under way. Beyond it gateways ask in random order, so that each of them asks for other pairs, and learns from
# the nodes' statuses which pairs the others have asked for.
_ASKING_MAX = 256

Pair = tuple[int, int]  # incarnations of a prefill node and a decode node


@dataclass(frozen=True)
class ConnectNodes:
    """Ask the prefill node to connect to the decode node, then call `Pairing.answered` or `Pairing.failed`."""

    pair: Pair
    prefill_address: str
    decode_address: str  # as the decode node advertises it


PairingCommand = ConnectNodes | LogLine


@dataclass
class _PairState:
    """Connect requests for one pair until it is settled."""

    prefill: FleetNode
    decode: FleetNode
    retry_s: float = _RETRY_S_MIN
    next_at_s: float = 0.0


@dataclass
class Pairing:
    """The pairs that the fleet has chosen.

    Attributes:
        link_retry_s: interval at which a link that was too slow is measured again, because it may have been busy.
        random: for the order of requests; a different one for each gateway.
    """

    fleet: Fleet
    link_retry_s: float
    random: Generator = field(default_factory=lambda: default_rng(0))
    _chosen: Sequence[tuple[FleetNode, FleetNode]] = ()
    _of_prefill: dict[FleetNode, list[FleetNode]] = field(default_factory=dict)
    _seen_peers: dict[FleetNode, object] = field(default_factory=dict)  # the peers at the last look at the node
    _pairs: dict[Pair, _PairState] = field(default_factory=dict)  # all that had to be asked for
    _open: set[Pair] = field(default_factory=set)  # those to ask for, now or later
    _asking: set[Pair] = field(default_factory=set)
    _logged: set[Pair] = field(default_factory=set)  # settled

    def settled(self) -> bool:
        """Whether every chosen pair is ready or refused."""
        return all(settled(prefill, decode) for prefill, decode in self.fleet.pairs())

    def check(self, now_s: float) -> list[PairingCommand]:
        """Returns connect requests for all chosen pairs that are not ready and were not asked for recently."""
        commands: list[PairingCommand] = []
        chosen = self.fleet.pairs()
        if chosen is not self._chosen:
            self._choose(chosen)
        for prefill, decodes in self._of_prefill.items():
            # A look at all pairs costs more than all other work of a gateway with hundreds of idle nodes.
            if self._seen_peers.get(prefill) is not prefill.peers:
                self._seen_peers[prefill] = prefill.peers
                commands += self._look_at(prefill, decodes)
        return commands + self._ask(now_s)

    def _choose(self, chosen: Sequence[tuple[FleetNode, FleetNode]]) -> None:
        self._chosen = chosen
        self._of_prefill = {}
        for prefill, decode in chosen:
            self._of_prefill.setdefault(prefill, []).append(decode)
        self._seen_peers.clear()
        pairs = {_key(prefill, decode) for prefill, decode in chosen}
        for gone in self._pairs.keys() - pairs:
            del self._pairs[gone]
        for known in (self._open, self._asking, self._logged):
            known &= pairs

    def _look_at(self, prefill: FleetNode, decodes: Iterable[FleetNode]) -> list[LogLine]:
        lines: list[LogLine] = []
        for decode in decodes:
            pair, peer = _key(prefill, decode), prefill.peers.get(decode.incarnation)
            if not settled(prefill, decode):
                self._logged.discard(pair)
            elif peer is not None and pair not in self._logged:
                self._logged.add(pair)
                lines += _describe(prefill, decode, peer)
            if not settled(prefill, decode) or (peer is not None and too_slow(peer)):
                self._pairs.setdefault(pair, _PairState(prefill, decode))
                self._open.add(pair)
            else:
                self._open.discard(pair)
        return lines

    def _ask(self, now_s: float) -> list[ConnectNodes]:
        due = [pair for pair in self._open - self._asking if now_s >= self._pairs[pair].next_at_s]
        due.sort()
        room = _ASKING_MAX - len(self._asking)
        if len(due) > room:
            due = [due[place] for place in self.random.choice(len(due), room, replace=False).tolist()]
        self._asking.update(due)
        states = ((pair, self._pairs[pair]) for pair in due)
        return [ConnectNodes(pair, each.prefill.address, each.decode.status.info.address) for pair, each in states]

    def answered(self, pair: Pair, state: node_status_pb2.PeerState, now_s: float) -> list[LogLine]:
        """Records the prefill node's answer about a pair. No effect for a pair whose nodes are gone."""
        pending = self._pairs.get(pair)
        if pending is None:
            return []
        self._retry_later(pair, now_s, self.link_retry_s if too_slow(state) else pending.retry_s)
        if state.phase in SETTLED:
            return []
        return [LogLine(f"{pending.prefill.name} cannot connect to {pending.decode.name} yet: {state.detail}")]

    def failed(self, pair: Pair, error: BatonError, now_s: float) -> list[LogLine]:
        """Records that the call to the prefill node failed. No effect for a pair whose nodes are gone."""
        pending = self._pairs.get(pair)
        if pending is None:
            return []
        self._retry_later(pair, now_s, pending.retry_s)
        return [LogLine(f"{pending.prefill.name} could not be asked to connect to {pending.decode.name}: {error}")]

    def _retry_later(self, pair: Pair, now_s: float, pause_s: float) -> None:
        pending = self._pairs[pair]
        self._asking.discard(pair)
        pending.next_at_s = now_s + pause_s
        pending.retry_s = min(2 * pending.retry_s, _RETRY_S_MAX)


def _key(prefill: FleetNode, decode: FleetNode) -> Pair:
    return prefill.incarnation, decode.incarnation


def _describe(prefill: FleetNode, decode: FleetNode, state: node_status_pb2.PeerState) -> list[LogLine]:
    if state.phase == node_status_pb2.PEER_PHASE_READY:
        how = f"{state.transport} at {state.gigabytes_per_s:.1f} GB/s"
        how += f"; KV is converted, {state.kv_converted}" if state.kv_converted else ""
        return [LogLine(f"{prefill.name} and {decode.name} are paired over {how}")]
    reasons = [f"  {item.field}: {item.ours} and {item.theirs}; {item.cure}" for item in state.mismatches]
    first = f"{prefill.name} and {decode.name} cannot work together:"
    return [LogLine(text, warning=True) for text in (first, *reasons)]
