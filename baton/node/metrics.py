"""A node's page of metrics: its own counters, and those of its status, engine, transfer and pairs."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from baton.core.logs import dropped_lines
from baton.metrics.exposition import Exposition, Figure
from baton.metrics.metric import SwitchOutcome
from baton.metrics.page import join
from baton.node.assembly import Node
from baton.node.kv_stores import store_figures
from baton.node.own_status import kept_entries
from baton.protos.v1 import node_status_pb2
from kvtransfer.records import TransferCounters
from kvtransfer.refusals import SegmentRefusal

_PREFILL = node_status_pb2.ROLE_PREFILL


class NodeMetrics:
    """The metrics of one node.

    Args:
        status: returns the node's current status.
        leases: returns the number of leases by state; empty if the node gives none.
        knows: whether a request of the engine belongs to the role; the blocks of other requests are leaked.
        switches: number of role switches by outcome.
    """

    def __init__(
        self,
        node: Node,
        *,
        status: Callable[[], node_status_pb2.NodeStatus],
        leases: Callable[[], Mapping[str, int]],
        knows: Callable[[str], bool],
        switches: Mapping[SwitchOutcome, int] = MappingProxyType({}),
    ) -> None:
        self._switches = switches
        self._node = node
        self._status = status
        self._leases = leases
        self._knows = knows
        self._exposition = Exposition(node.meter_role, node.counts.layout, node.info.model.name)

    async def page(self, names: frozenset[str] = frozenset()) -> bytes:
        """The text for Prometheus."""
        return await join(self._exposition.pages(self._node.counts.tally.own(), list(self._figures()), names))

    def _figures(self) -> Iterator[Figure]:
        status = self._status()
        yield Figure("baton_log_lines_dropped_total", dropped_lines())
        for outcome, count in self._switches.items():
            yield Figure("baton_role_switches_total", count, (outcome,))
        yield from self._load_figures(status)
        yield from self._engine_figures(status)
        counters = self._node.transfer.counters()
        yield from store_figures(kept_entries(self._node, counters))
        yield from self._transfer_figures(status, counters)
        for state, count in self._leases().items():
            yield Figure("baton_kv_leases", count, (state,))

    def _load_figures(self, status: node_status_pb2.NodeStatus) -> Iterator[Figure]:
        total, free = status.blocks_total, status.blocks_free
        yield Figure("baton_num_requests_running", status.requests_running)
        yield Figure("baton_num_requests_waiting", status.requests_waiting)
        yield Figure("baton_prefill_backlog_seconds", status.backlog_s)
        yield Figure("baton_prefill_backlog_tokens", status.tokens_waiting)
        yield Figure("baton_kv_cache_usage_perc", 1 - free / total if total else 0.0)
        yield Figure("baton_kv_blocks", total)
        yield Figure("baton_kv_blocks_free", free)
        yield Figure("baton_kv_blocks_leased", status.blocks_leased)
        yield Figure("baton_kv_blocks_leaked", self._node.engine.leaked_blocks(self._knows))
        yield Figure("baton_decode_rows", status.decode_rows)
        yield Figure("baton_decode_context_tokens", status.context_tokens)

    def _engine_figures(self, status: node_status_pb2.NodeStatus) -> Iterator[Figure]:
        load = self._node.engine.load()
        yield Figure("baton_engine_requests_total", status.requests_total)
        yield Figure("baton_engine_refused_late_total", load.refused_late)
        yield Figure("baton_num_preemptions_total", status.preemptions)
        yield Figure("baton_prefix_cache_queries_total", load.cache_queries, ("device",))
        yield Figure("baton_prefix_cache_hits_total", load.cache_hits, ("device",))
        for launch, count in self._node.built.runner.launches.items():
            yield Figure("baton_engine_step_launches_total", count, (launch,))
        yield from self._node.experts.figures()

    def _transfer_figures(self, status: node_status_pb2.NodeStatus, counters: TransferCounters) -> Iterator[Figure]:
        direction = "sent" if self._node.role == _PREFILL else "received"
        yield Figure("baton_kv_transfer_bytes_total", counters.bytes_total, (direction,))
        yield Figure("baton_kv_transfer_segments_total", counters.segments_total, (direction,))
        yield Figure("baton_kv_segments_converted_total", counters.converted)
        for refusal in SegmentRefusal:
            yield Figure("baton_kv_segments_refused_total", counters.refusals.get(refusal, 0), (refusal.name.lower(),))
        pairs = [peer for peer in status.peers if peer.phase == node_status_pb2.PEER_PHASE_READY]
        yield Figure("baton_pairs_ready", len(pairs))
        for peer in pairs:
            yield Figure("baton_link_info", 1, (peer.name, peer.transport))
            yield Figure("baton_link_bandwidth_bytes_per_second", 1e9 * peer.gigabytes_per_s, (peer.name,))
            yield Figure("baton_link_latency_seconds", peer.latency_s, (peer.name,))
            yield Figure("baton_link_bytes_total", peer.bytes_total, (peer.name,))
