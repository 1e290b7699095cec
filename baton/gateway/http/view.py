"""The state of the gateway and its cluster as one JSON object, for the page /ui and `baton top`.

An operator sees the cluster and all requests, an authenticated client sees its own requests, and anybody else sees only
the names of gateway and model.
"""

import asyncio
import time
from math import isfinite
from types import TracebackType
from typing import Any, Self

import orjson

from baton.core.costs import StepWork
from baton.core.kv_entries import ENTRY_TOKENS
from baton.core.limits import TOPOLOGY_LABELS_MAX
from baton.core.log_lines import printable
from baton.core.version import __version__
from baton.gateway.core.shared_counters import REFUSALS, Count
from baton.gateway.fleet.fleet import Fleet
from baton.gateway.fleet.fleet_node import FleetNode
from baton.gateway.observe.latencies import STEP_S, WINDOW_STEPS, Latencies
from baton.gateway.observe.load import LoadMeter
from baton.gateway.observe.metrics import state_of
from baton.gateway.observe.node_history import HISTORY_STEP_S, NodeHistory
from baton.gateway.observe.recent import Shown
from baton.gateway.observe.slow_reasons import mark_slow
from baton.gateway.serving.serving import Serving
from baton.protos.v1 import node_status_pb2
from baton.rpc.convert import phase_name, role_name
from baton.rpc.revisions import Member, mixture
from baton.security.authorize import rights_for
from baton.security.identity import Caller
from baton.settings.gateway_config import GatewaySettings

REQUESTS_SHOWN = 60
_TEXT_MAX = 400
_KEPT_S = 1.0  # how long an answer is reused, so that many viewers cost no more than one
_CLIENTS_MAX = 100
_GPUS_MAX = 64  # of one node
_STORES_MAX = 8  # likewise
_CLUSTER = rights_for("/baton.v1.Operations/ClusterView")


class View:
    """Builds the JSON for each caller. Samples the charts' latencies and this process's load in its `async with` block.

    Attributes:
        name: the gateway's name.
    """

    def __init__(self, settings: GatewaySettings, serving: Serving, fleet: Fleet, name: str) -> None:
        self.name = name
        self._slo = settings.slo
        self._serving = serving
        self._fleet = fleet
        self._latencies = Latencies(serving.shared_counters)
        self._load = LoadMeter(serving.shared_counters)
        self._history = NodeHistory()
        self._answers: dict[str | None, tuple[float, bytes]] = {}  # by client; None: callers who see everything

    async def __aenter__(self) -> Self:
        self._reading = asyncio.create_task(self._read(), name="latencies")
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._reading.cancel()
        await asyncio.wait([self._reading])

    async def _read(self) -> None:
        while True:
            self._load.read()
            self._latencies.read()
            self._history.read(self._fleet.nodes(), time.monotonic())
            await asyncio.sleep(STEP_S)

    async def shown_to(self, caller: Caller) -> bytes:
        """Returns what this caller may see, as UTF-8 JSON that is at most a second old."""
        sees = may_see(caller)
        client = None if sees == "cluster" else caller.name if sees == "own" else ""
        at_s, answer = self._answers.get(client, (0.0, b""))
        if answer and time.monotonic() - at_s < _KEPT_S:
            return answer
        answer = orjson.dumps(await self._state(sees, client))
        self._answers.pop(client, None)
        self._answers[client] = time.monotonic(), answer
        if len(self._answers) > _CLIENTS_MAX:
            del self._answers[next(iter(self._answers))]
        return answer

    async def _state(self, sees: str, client: str | None) -> dict[str, Any]:
        serving = self._serving
        slo = self._slo
        requests: list[Shown] = []
        if sees != "nothing":
            requests = await serving.recent_of_all(REQUESTS_SHOWN, client)
            mark_slow(requests, ttft_s=slo.ttft_s, tpot_s=slo.tpot_s)
        found: dict[str, Any] = {
            "now_s": round(time.time(), 3),
            "gateway": self.name,
            "model": serving.model.name,
            "description": serving.model.description,
            "version": __version__,
            "chat": serving.model.chat.has_template,
            "draining": serving.draining,
            "sees": sees,
            "requests": requests,
            "slo": {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s},
        }
        if sees == "cluster":
            found |= {
                "totals": _totals(serving),
                "workers": _workers(serving),
                "mixed": self._mixed(),
                "history_step_s": HISTORY_STEP_S,
                **_nodes_and_links(self._fleet, self._history),
                "charts": _charts(self._latencies),
            }
        return found

    def _mixed(self) -> str:
        """Describes the versions and revisions that serve at once; empty if there is one of each."""
        members = [
            Member(node.name, node.version, node.revision, node.revision_name)
            for node in self._fleet.nodes()
            if node.serves
        ]
        return printable(mixture([Member(self.name, __version__), *members]), _TEXT_MAX)


def may_see(caller: Caller) -> str:
    """Returns "cluster", "own" for the caller's own requests, or "nothing".

    A caller without a key sees nothing, because several clients may share its host.
    """
    if caller.rights & _CLUSTER:
        return "cluster"
    return "own" if caller.proved and caller.name else "nothing"


def _totals(serving: Serving) -> dict[str, int]:
    total = serving.shared_counters.total
    waiting = total(Count.WAITING)
    return {
        "running": total(Count.RUNNING) - waiting,
        "waiting": waiting,
        "finished": total(Count.FINISHED),
        "failed": total(Count.FAILED),
        "refused": sum(total(count) for count in REFUSALS.values()),
        "remote": total(Count.REMOTE),
        "local": total(Count.LOCAL),
        "workers": serving.shared_counters.rows,
    }


def _workers(serving: Serving) -> list[dict[str, Any]]:
    return [
        {
            "busy_share": load.busy_share,
            "tokens_per_s": load.tokens_per_s,
            "limit_tokens_per_s": load.limit_tokens_per_s,
        }
        for load in serving.worker_loads
    ]


def _charts(latencies: Latencies) -> dict[str, Any]:
    points = list(latencies.points)
    columns = list(zip(*(point.values for point in points), strict=True)) or [()] * 4
    rounded = [[None if value is None else round(value, 6) for value in column] for column in columns]
    return {
        "step_s": STEP_S,
        "window_s": STEP_S * WINDOW_STEPS,
        "at_s": [round(point.at_s, 1) for point in points],
        "ttft_p50": rounded[0],
        "ttft_p99": rounded[1],
        "gap_p50": rounded[2],
        "gap_p99": rounded[3],
        "tokens_per_s": [round(point.tokens_per_s, 1) for point in points],
    }


def _nodes_and_links(fleet: Fleet, history: NodeHistory) -> dict[str, Any]:
    nodes = list(fleet.nodes())
    numbers = {node.incarnation: number for number, node in enumerate(nodes) if node.incarnation}
    return {
        "nodes": [_node(node, history) for node in nodes],
        "links": [
            _link(number, numbers.get(peer.incarnation), peer)
            for number, node in enumerate(nodes)
            if node.role == node_status_pb2.ROLE_PREFILL
            for peer in node.peers.values()
        ],
    }


def _node(node: FleetNode, history: NodeHistory) -> dict[str, Any]:
    status, info = node.status, node.status.info
    points = list(history.of(node))
    return {
        "name": printable(node.name, _TEXT_MAX),
        "address": printable(node.address, _TEXT_MAX),
        "role": role_name(node.role),
        "also_decodes": node.also_decodes,
        "state": state_of(node),
        "detail": printable(node.detail, _TEXT_MAX),
        "version": printable(info.package_version, _TEXT_MAX),
        "revision": node.revision,
        "revision_name": printable(node.revision_name, _TEXT_MAX),
        "topology": [printable(each, _TEXT_MAX) for each in info.topology[:TOPOLOGY_LABELS_MAX]],
        "ranks": info.tensor_parallel_size or 1,
        "layout": printable(info.cache_shape.layout, _TEXT_MAX),
        "block_size": info.cache_shape.block_size,
        "dtype": printable(info.cache_spec.dtype, _TEXT_MAX),
        "running": status.requests_running,
        "waiting": status.requests_waiting,
        "rows": status.decode_rows,
        "seats": status.max_batch_requests,
        "backlog_s": _finite(status.backlog_s),
        "step_s": _step_s(node),
        "tokens_waiting": status.tokens_waiting,
        "blocks": status.blocks_total,
        "blocks_free": status.blocks_free,
        "blocks_leased": status.blocks_leased,
        "tokens_per_s": points[-1].tokens_per_s if points else None,
        "history": {
            "running": [point.running for point in points],
            "tokens_per_s": [point.tokens_per_s for point in points],
            "kv_percent": [point.kv_percent for point in points],
        },
        "gpus": [_gpu(gpu) for gpu in status.gpus[:_GPUS_MAX]],
        "stores": [_store(store) for store in status.stores[:_STORES_MAX]],
    }


def _gpu(gpu: node_status_pb2.GpuState) -> dict[str, Any]:
    """Describes one GPU; numbers that its driver does not give are None."""
    return {
        "name": printable(gpu.name, _TEXT_MAX),
        "memory_used_bytes": gpu.memory_used_bytes,
        "memory_total_bytes": gpu.memory_total_bytes,
        "busy_share": _finite(gpu.busy_share) if gpu.HasField("busy_share") else None,
        "power_w": round(_finite(gpu.power_w), 1) if gpu.HasField("power_w") else None,
        "power_limit_w": round(_finite(gpu.power_limit_w), 1) if gpu.HasField("power_limit_w") else None,
    }


def _store(store: node_status_pb2.StoreState) -> dict[str, Any]:
    return {
        "name": printable(store.name, _TEXT_MAX),
        "bytes": store.bytes,
        "tokens_read": ENTRY_TOKENS * store.loaded_total,
        "damaged": store.damaged_total,
    }


def _step_s(node: FleetNode) -> float | None:
    """Predicts the time of the node's next decode step from its step costs. Returns None if no request decodes."""
    costs, status = node.view().costs, node.status
    if costs is None or not status.decode_rows:
        return None
    return _finite(costs.seconds(StepWork(decode_rows=status.decode_rows, keys=status.context_tokens)))


def _link(prefill: int, decode: int | None, peer: node_status_pb2.PeerState) -> dict[str, Any]:
    """Describes one pair of nodes for /ui.

    Args:
        prefill, decode: indices into the list of nodes; `decode` is None if the gateway does not know the node.
    """
    mismatches = [f"{item.field}: {item.ours} and {item.theirs}; {item.cure}" for item in peer.mismatches]
    return {
        "prefill": prefill,
        "decode": decode,
        "peer": printable(peer.name, _TEXT_MAX),
        "state": phase_name(peer.phase),
        "transport": printable(peer.transport, _TEXT_MAX),
        "gigabytes_per_s": _finite(peer.gigabytes_per_s),
        "latency_s": _finite(peer.latency_s),
        "bytes_total": peer.bytes_total,
        "segments_total": peer.segments_total,
        "detail": printable("; ".join([*([peer.detail] if peer.detail else []), *mismatches]), _TEXT_MAX),
    }


def _finite(value: float) -> float:
    """Returns the value, or 0 if it is not finite, which JSON cannot express."""
    return value if isfinite(value) else 0.0
