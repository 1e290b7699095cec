"""The gateway's metrics page: the cells of its counters, and values that are read at the time of the scrape."""

from collections import Counter
from collections.abc import Callable, Iterator

from baton.gateway.core.shared_counters import REFUSALS, Count, SharedCounters
from baton.gateway.fleet.fleet import Fleet
from baton.gateway.fleet.fleet_node import FleetNode
from baton.gateway.fleet.revisions import serving_revisions, serving_versions
from baton.gateway.observe.load import worker_loads
from baton.metrics.exposition import Exposition, Figure
from baton.metrics.metric import ProcessRole
from baton.metrics.page import join

_STATES = ("ready", "loading", "draining", "unusable", "unreachable")


class GatewayMetrics:
    """The metrics of all processes of a gateway together; nodes are shown as this process sees them.

    Args:
        ready: returns whether new requests can be served.
    """

    def __init__(self, counters: SharedCounters, model_name: str, fleet: Fleet, ready: Callable[[], bool]) -> None:
        self._counters = counters
        self._fleet = fleet
        self._ready = ready
        # With several processes, each scrape reaches another one, so values of one process would jump.
        self._exposition = Exposition(ProcessRole.GATEWAY, counters.layout, model_name, process=counters.rows == 1)

    async def page(self, names: frozenset[str] = frozenset()) -> bytes:
        """The text for Prometheus."""
        return await join(self._exposition.pages(self._counters.totals(), list(self.figures()), names))

    def figures(self) -> Iterator[Figure]:
        """Current values that are not among the cells of the counters."""
        total = self._counters.total
        waiting = total(Count.WAITING)
        yield Figure("baton_num_requests_running", total(Count.RUNNING) - waiting)
        yield Figure("baton_num_requests_waiting", waiting)
        yield Figure("baton_ready", int(self._ready()))
        yield Figure("baton_workers", self._counters.rows)
        for row, load in enumerate(worker_loads(self._counters)):
            yield Figure("baton_worker_busy_ratio", load.busy_share, (str(row),))
        for reason, count in REFUSALS.items():
            yield Figure("baton_requests_refused_total", total(count), (reason,))
        for role, nodes in (("prefill", self._fleet.prefills), ("decode", self._fleet.decodes)):
            states = Counter(map(state_of, nodes.values()))
            for state in _STATES:
                yield Figure("baton_nodes", states[state], (role, state))
            for node in nodes.values():
                if node.reachable:
                    labels = (node.name, role, node.version, node.revision, node.revision_name)
                    yield Figure("baton_node_info", 1, labels)
        yield Figure("baton_serving_versions", len(serving_versions(self._fleet.nodes())))
        yield Figure("baton_serving_revisions", len(serving_revisions(self._fleet.nodes())))


def state_of(node: FleetNode) -> str:
    """The state of a node in one word, one of `_STATES`."""
    if node.open:
        return "ready"
    if node.loading:
        return "loading"
    if not node.reachable:
        return "unreachable"
    return "draining" if node.status.draining else "unusable"
