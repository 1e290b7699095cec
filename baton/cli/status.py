"""`baton status`: a gateway's view of its cluster, as tables or as JSON."""

import asyncio
import json
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from baton.client import DEFAULT_TARGET, Client
from protos.baton.v1 import common_pb2, generation_pb2

_WIDTH_IN_FILES = 160


def status(
    target: Annotated[str, typer.Option(help="host:port of a gateway.")] = DEFAULT_TARGET,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show nodes, their requests and blocks, and the state of each prefill/decode pair."""
    cluster = asyncio.run(_ask(target))
    if as_json:
        print(json.dumps(to_json(cluster)))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH_IN_FILES
    nodes = cluster.nodes
    console.print(
        f"{cluster.gateway}: {cluster.requests_running} running, {cluster.requests_finished} finished, "
        f"{cluster.requests_failed} failed; prompts prefilled remotely {cluster.remote_total}, locally "
        f"{cluster.local_total}",
        markup=False,
    )
    console.print(_nodes_table(nodes))
    pairs = [(node, peer) for node in nodes for peer in node.status.peers if _is_prefill(node)]
    if pairs:
        console.print(_pairs_table(pairs))
    for node, peer in pairs:
        for item in peer.mismatches:
            line = f"{_name(node)} and {peer.name}: {item.field}: {item.ours} and {item.theirs}; {item.cure}"
            console.print(line, style="red", markup=False)


def to_json(cluster: generation_pb2.ClusterStatusResponse) -> dict[str, object]:
    """The object that `--json` prints. Incarnations are hexadecimal: JSON numbers lose their digits."""
    return {
        "gateway": cluster.gateway,
        "requests_running": cluster.requests_running,
        "requests_finished": cluster.requests_finished,
        "requests_failed": cluster.requests_failed,
        "remote_total": cluster.remote_total,
        "local_total": cluster.local_total,
        "nodes": [_node_to_json(node) for node in cluster.nodes],
    }


async def _ask(target: str) -> generation_pb2.ClusterStatusResponse:
    async with Client(target) as client:
        return await client.cluster_status()


def _node_to_json(node: generation_pb2.NodeReport) -> dict[str, object]:
    status, info = node.status, node.status.info
    return {
        "name": info.name,
        "address": node.address,
        "role": _role(node),
        "reachable": node.reachable,
        "detail": node.detail,
        "draining": status.draining,
        "incarnation": f"{info.incarnation:x}",
        "version": info.package_version,
        "model": info.model.name,
        "architecture": info.model.architecture,
        "dtype": info.cache_spec.dtype,
        "layout": info.cache_shape.layout,
        "block_size": info.cache_shape.block_size,
        "tensor_parallel_size": info.tensor_parallel_size or 1,
        "max_context_tokens": info.max_context_tokens,
        "blocks_total": status.blocks_total,
        "blocks_free": status.blocks_free,
        "blocks_used": status.blocks_total - status.blocks_free,
        "blocks_leased": status.blocks_leased,
        "requests_running": status.requests_running,
        "requests_waiting": status.requests_waiting,
        "requests_total": status.requests_total,
        "tokens_waiting": status.tokens_waiting,
        "preemptions": status.preemptions,
        "segments_refused": status.segments_refused,
        "segments_late": status.segments_late,
        "segments_converted": status.segments_converted,
        "peers": [_peer_to_json(peer) for peer in status.peers],
    }


def _peer_to_json(peer: common_pb2.PeerState) -> dict[str, object]:
    return {
        "name": peer.name,
        "address": peer.address,
        "incarnation": f"{peer.incarnation:x}",
        "state": _phase(peer),
        "transport": peer.transport,
        "kv_converted": peer.kv_converted,
        "gigabytes_per_s": peer.gigabytes_per_s,
        "latency_s": peer.latency_s,
        "bytes_total": peer.bytes_total,
        "segments_total": peer.segments_total,
        "detail": peer.detail,
        "mismatches": [
            {"field": item.field, "ours": item.ours, "theirs": item.theirs, "cure": item.cure}
            for item in peer.mismatches
        ],
    }


def _nodes_table(nodes: Sequence[generation_pb2.NodeReport]) -> Table:
    table = Table(
        "node", "role", "address", "state", "model", "ranks", "KV", "blocks used", "running", "waiting", box=SIMPLE
    )
    for node in nodes:
        status, info = node.status, node.status.info
        state = "draining" if status.draining else "ready"
        cells = (
            _name(node),
            _role(node),
            node.address,
            state if node.reachable else node.detail,
            info.model.name,
            str(info.tensor_parallel_size or 1),
            f"{info.cache_shape.layout} x {info.cache_shape.block_size}, {info.cache_spec.dtype}",
            f"{status.blocks_total - status.blocks_free} of {status.blocks_total}",
            str(status.requests_running),
            str(status.requests_waiting),
        )
        table.add_row(*map(escape, cells), style=None if node.reachable else "red")
    return table


def _pairs_table(pairs: Sequence[tuple[generation_pb2.NodeReport, common_pb2.PeerState]]) -> Table:
    columns = ("prefill", "decode", "state", "transport", "KV", "GB/s", "latency us", "sent MiB", "segments")
    table = Table(*columns, box=SIMPLE)
    for node, peer in pairs:
        state = _phase(peer)
        cells = (
            _name(node),
            peer.name,
            f"{state}: {peer.detail}" if peer.detail else state,
            peer.transport,
            peer.kv_converted or node.status.info.cache_spec.dtype,
            f"{peer.gigabytes_per_s:.2f}",
            f"{peer.latency_s * 1e6:.0f}",
            f"{peer.bytes_total / (1 << 20):.1f}",
            str(peer.segments_total),
        )
        table.add_row(*map(escape, cells), style=None if peer.phase == common_pb2.PEER_PHASE_READY else "red")
    return table


def _name(node: generation_pb2.NodeReport) -> str:
    return node.status.info.name or node.address


def _role(node: generation_pb2.NodeReport) -> str:
    role = node.status.info.role
    return common_pb2.Role.Name(role).removeprefix("ROLE_").lower() if role else "unknown"


def _is_prefill(node: generation_pb2.NodeReport) -> bool:
    return node.status.info.role == common_pb2.ROLE_PREFILL


def _phase(peer: common_pb2.PeerState) -> str:
    return common_pb2.PeerPhase.Name(peer.phase).removeprefix("PEER_PHASE_").lower()
