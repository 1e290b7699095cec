"""Decides when to ask which prefill node to connect to which decode node. Pure: no clock, task or socket.

Nodes keep no list of each other: a gateway that sees both asks the prefill node to connect to the decode node before
there is traffic. Repeated requests have no effect, so any number of gateways may ask.
"""

from dataclasses import dataclass, field

from baton.core.errors import BatonError
from baton.gateway.fleet.fleet import Fleet
from baton.gateway.fleet.fleet_node import SETTLED, FleetNode, settled
from baton.gateway.fleet.node_table import LogLine
from baton.protos.v1 import node_status_pb2

_RETRY_S_MIN, _RETRY_S_MAX = 0.1, 5.0

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

    prefill: str
    decode: str
    retry_s: float = _RETRY_S_MIN
    next_at_s: float = 0.0
    asking: bool = False


@dataclass
class Pairing:
    """All pairs of the nodes in the fleet.

    Attributes:
        link_retry_s: interval at which a link that was too slow is measured again, because it may have been busy.
    """

    fleet: Fleet
    link_retry_s: float
    _pairs: dict[Pair, _PairState] = field(default_factory=dict)
    _logged: set[Pair] = field(default_factory=set)  # settled

    def settled(self) -> bool:
        """Whether every pair of reachable nodes is ready or refused."""
        return all(settled(prefill, decode) for prefill, decode in self.fleet.reachable_pairs())

    def check(self, now_s: float) -> list[PairingCommand]:
        """Returns connect requests for all pairs that are not ready and were not asked for recently."""
        commands: list[PairingCommand] = []
        wanted = {(p.incarnation, d.incarnation): (p, d) for p, d in self.fleet.reachable_pairs()}
        for gone in self._pairs.keys() - wanted.keys():
            del self._pairs[gone]
        self._logged &= wanted.keys()
        for pair, (prefill, decode) in wanted.items():
            if settled(prefill, decode):
                state = prefill.peers[decode.incarnation]
                if pair not in self._logged:
                    self._logged.add(pair)
                    commands += _describe(prefill, decode, state)
                if not _too_slow(state):
                    continue
            else:
                self._logged.discard(pair)
            pending = self._pairs.setdefault(pair, _PairState(prefill.name, decode.name))
            if not pending.asking and now_s >= pending.next_at_s:
                pending.asking = True
                commands.append(ConnectNodes(pair, prefill.address, decode.status.info.address))
        return commands

    def answered(self, pair: Pair, state: node_status_pb2.PeerState, now_s: float) -> list[LogLine]:
        """Records the prefill node's answer about a pair. No effect for a pair whose nodes are gone."""
        pending = self._pairs.get(pair)
        if pending is None:
            return []
        _retry_later(pending, now_s, self.link_retry_s if _too_slow(state) else pending.retry_s)
        if state.phase in SETTLED:
            return []
        return [LogLine(f"{pending.prefill} cannot connect to {pending.decode} yet: {state.detail}")]

    def failed(self, pair: Pair, error: BatonError, now_s: float) -> list[LogLine]:
        """Records that the call to the prefill node failed. No effect for a pair whose nodes are gone."""
        pending = self._pairs.get(pair)
        if pending is None:
            return []
        _retry_later(pending, now_s, pending.retry_s)
        return [LogLine(f"{pending.prefill} could not be asked to connect to {pending.decode}: {error}")]


def _retry_later(pending: _PairState, now_s: float, pause_s: float) -> None:
    pending.asking = False
    pending.next_at_s = now_s + pause_s
    pending.retry_s = min(2 * pending.retry_s, _RETRY_S_MAX)


def _too_slow(peer: node_status_pb2.PeerState) -> bool:
    """Whether the pair was refused only for its slow link."""
    return peer.phase == node_status_pb2.PEER_PHASE_REFUSED and all(item.field == "link" for item in peer.mismatches)


def _describe(prefill: FleetNode, decode: FleetNode, state: node_status_pb2.PeerState) -> list[LogLine]:
    if state.phase == node_status_pb2.PEER_PHASE_READY:
        how = f"{state.transport} at {state.gigabytes_per_s:.1f} GB/s"
        how += f"; KV is converted, {state.kv_converted}" if state.kv_converted else ""
        return [LogLine(f"{prefill.name} and {decode.name} are paired over {how}")]
    reasons = [f"  {item.field}: {item.ours} and {item.theirs}; {item.cure}" for item in state.mismatches]
    first = f"{prefill.name} and {decode.name} cannot work together:"
    return [LogLine(text, warning=True) for text in (first, *reasons)]
