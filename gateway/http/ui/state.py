"""`/ui/state`: what the page shows, as one JSON object.

An operator sees the cluster and all requests; a client that has shown who it is sees its own requests; anybody else
sees the names of gateway and model only.
"""

import time
from math import isfinite
from typing import Any

import orjson
from starlette.responses import Response

from baton import __version__
from baton.errors import shortened
from baton.security import identity
from baton.security.authorize import rights_for
from baton.security.identity import Caller
from gateway.board import Count
from gateway.figures import state_of
from gateway.fleet import Fleet
from gateway.fleet_node import FleetNode
from gateway.http.call import Call, Context
from gateway.latencies import STEP_S, WINDOW_STEPS
from gateway.recent import Shown
from gateway.slow import mark_slow
from gateway.waiting_room import REFUSALS
from protos.baton.v1 import common_pb2

REQUESTS_SHOWN = 60
_TEXT_MAX = 400
_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
_CLUSTER = rights_for("/baton.v1.Generation/ClusterStatus")


async def state(call: Call) -> Response:
    """What the caller may see."""
    caller, context = identity.current(), call.context
    sees = may_see(caller)
    client = None if sees == "cluster" else caller.name if sees == "own" else ""
    body = context.answers.get(client)
    if body is None:
        body = context.answers.keep(client, orjson.dumps(await _state(context, sees, client)))
    return Response(body, media_type="application/json", headers=_HEADERS)


def may_see(caller: Caller) -> str:
    """ "cluster", "own" requests, or "nothing": a host may be shared by many who have shown no key."""
    if caller.rights & _CLUSTER:
        return "cluster"
    return "own" if caller.proved and caller.name else "nothing"


async def _state(context: Context, sees: str, client: str | None) -> dict[str, Any]:
    serving, settings = context.serving, context.settings
    requests: list[Shown] = []
    if sees != "nothing":
        requests = await serving.recent_of_all(REQUESTS_SHOWN, client)
        mark_slow(requests, ttft_s=_seconds(settings.ttft_ms), tpot_s=_seconds(settings.tpot_ms))
    found: dict[str, Any] = {
        "now_s": round(time.time(), 3),
        "gateway": context.name,
        "model": serving.model.name,
        "version": __version__,
        "chat": serving.model.chat.has_template,
        "draining": context.draining,
        "sees": sees,
        "requests": requests,
        "slo": {"ttft_s": _seconds(settings.ttft_ms), "tpot_s": _seconds(settings.tpot_ms)},
    }
    if sees == "cluster":
        found |= {"totals": _totals(context), **_nodes_and_links(context.fleet), "charts": _charts(context)}
    return found


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _totals(context: Context) -> dict[str, int]:
    total = context.serving.board.total
    waiting = total(Count.WAITING)
    return {
        "running": total(Count.RUNNING) - waiting,
        "waiting": waiting,
        "finished": total(Count.FINISHED),
        "failed": total(Count.FAILED),
        "refused": sum(total(count) for count in REFUSALS.values()),
        "remote": total(Count.REMOTE),
        "local": total(Count.LOCAL),
        "workers": context.serving.board.rows,
    }


def _charts(context: Context) -> dict[str, Any]:
    points = list(context.latencies.points)
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


def _nodes_and_links(fleet: Fleet) -> dict[str, Any]:
    nodes = list(fleet.nodes())
    numbers = {node.incarnation: number for number, node in enumerate(nodes) if node.incarnation}
    return {
        "nodes": [_node(node) for node in nodes],
        "links": [
            _link(number, numbers.get(peer.incarnation), peer)
            for number, node in enumerate(nodes)
            if node.role == common_pb2.ROLE_PREFILL
            for peer in node.peers.values()
        ],
    }


def _node(node: FleetNode) -> dict[str, Any]:
    status, info = node.status, node.status.info
    return {
        "name": shortened(node.name, _TEXT_MAX),
        "address": shortened(node.address, _TEXT_MAX),
        "role": "prefill" if node.role == common_pb2.ROLE_PREFILL else "decode",
        "also_decodes": node.also_decodes,
        "state": state_of(node),
        "detail": shortened(node.detail, _TEXT_MAX),
        "version": shortened(info.package_version, _TEXT_MAX),
        "ranks": info.tensor_parallel_size or 1,
        "layout": shortened(info.cache_shape.layout, _TEXT_MAX),
        "block_size": info.cache_shape.block_size,
        "dtype": shortened(info.cache_spec.dtype, _TEXT_MAX),
        "running": status.requests_running,
        "waiting": status.requests_waiting,
        "rows": status.decode_rows,
        "seats": status.max_batch_requests,
        "backlog_s": _finite(status.backlog_s),
        "tokens_waiting": status.tokens_waiting,
        "blocks": status.blocks_total,
        "blocks_free": status.blocks_free,
        "blocks_leased": status.blocks_leased,
    }


def _link(prefill: int, decode: int | None, peer: common_pb2.PeerState) -> dict[str, Any]:
    """Args:
    prefill, decode: the nodes' places in the list; None: the gateway does not know the decode node.
    """
    known = peer.phase in common_pb2.PeerPhase.values()
    phase = common_pb2.PeerPhase.Name(peer.phase).removeprefix("PEER_PHASE_").lower() if known else "unknown"
    mismatches = [f"{item.field}: {item.ours} and {item.theirs}; {item.cure}" for item in peer.mismatches]
    return {
        "prefill": prefill,
        "decode": decode,
        "peer": shortened(peer.name, _TEXT_MAX),
        "state": phase,
        "transport": shortened(peer.transport, _TEXT_MAX),
        "gigabytes_per_s": _finite(peer.gigabytes_per_s),
        "latency_s": _finite(peer.latency_s),
        "bytes_total": peer.bytes_total,
        "segments_total": peer.segments_total,
        "detail": shortened("; ".join([*([peer.detail] if peer.detail else []), *mismatches]), _TEXT_MAX),
    }


def _finite(value: float) -> float:
    """JSON has no other numbers."""
    return value if isfinite(value) else 0.0
