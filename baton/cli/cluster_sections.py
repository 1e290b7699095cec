"""The sections of a frame that show a cluster: nodes, links and slow requests, each with its columns. Pure."""

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from baton.cli.cluster_view import ClusterView, ShownLink, ShownNode, ShownRequest
from baton.cli.frame_section import Column, Section
from baton.cli.frame_texts import NOTHING, seconds, size, state_color


def cluster_sections(
    view: ClusterView, before: ClusterView | None, width: int, *, whole: bool
) -> Sequence[Section[Any]]:
    nodes = sorted(view.nodes, key=lambda node: (node.role != "prefill", node.role, node.name))
    links = sorted(view.links, key=lambda link: (_name(view, link.prefill, ""), _name(view, link.decode, link.peer)))
    rates = _rates(view, before)
    slow = [request for request in view.requests if request.slow]
    by_trouble = sorted(nodes, key=lambda node: node.state == "ready")
    by_rate = sorted(links, key=lambda link: (link.state == "ready", -rates.get(_key(view, link), 0.0)))
    none_slow = f"none of the last {len(view.requests)} requests was slow or failed"
    return (
        Section("nodes", _node_columns(), nodes, by_trouble, "no node is known", width, whole),
        Section("links", _link_columns(view, rates), links, by_rate, "no link is known", width, whole),
        Section("slow requests", _request_columns(view), slow, slow, none_slow, width, whole),
    )


def _node_columns() -> Sequence[Column[ShownNode]]:
    return (
        Column("node", lambda node: node.name, right=False),
        Column("role", lambda node: node.role, right=False),
        Column("state", lambda node: Text(node.state, state_color(node.state)), right=False),
        Column("KV", _kv),
        Column("seats", lambda node: f"{node.rows if node.role == 'decode' else node.running}/{node.seats}"),
        Column("waiting", lambda node: str(node.waiting), from_width=60),
        Column("backlog", lambda node: seconds(node.backlog_s), from_width=70),
        Column("step", lambda node: seconds(node.step_s), from_width=80),
        Column("kept", _kept, from_width=110, right=False),
        Column("version", lambda node: node.version, from_width=90, right=False),
        Column("revision", lambda node: node.revision_name or node.revision, from_width=100, right=False),
        Column("address", lambda node: node.address, from_width=120, right=False),
        Column("why", lambda node: node.detail, from_width=60, right=False, shrinks=True),
    )


def _link_columns(view: ClusterView, rates: dict[tuple[str, str], float]) -> Sequence[Column[ShownLink]]:
    return (
        Column("link from", lambda link: _name(view, link.prefill, ""), right=False),
        Column("to", lambda link: _name(view, link.decode, link.peer), right=False),
        Column("state", lambda link: Text(link.state, state_color(link.state)), right=False),
        Column("GB/s", lambda link: f"{link.gigabytes_per_s:.2f}"),
        Column("MB/s now", lambda link: _megabytes(rates.get(_key(view, link))), from_width=60),
        Column("us", lambda link: f"{link.latency_s * 1e6:.0f}", from_width=70),
        Column("sent", lambda link: size(link.bytes_total), from_width=80),
        Column("transport", lambda link: link.transport, from_width=90, right=False),
        Column("why", lambda link: link.detail, from_width=100, right=False, shrinks=True),
    )


def _request_columns(view: ClusterView) -> Sequence[Column[ShownRequest]]:
    return (
        Column("slow request", lambda request: request.request_id, right=False),
        Column("ago", lambda request: _ago(view.now_s - request.ended_at_s)),
        Column("client", lambda request: request.client, from_width=130, right=False),
        Column("tokens", _tokens, from_width=90),
        Column("TTFT", lambda request: seconds(request.ttft_s), from_width=80),
        Column("total", lambda request: seconds(request.total_s), from_width=70),
        Column("path", _path, from_width=110, right=False),
        Column("why", lambda request: "; ".join(request.slow), right=False, shrinks=True),
    )


def _kv(node: ShownNode) -> Text:
    if not node.blocks:
        return Text(NOTHING)
    share = (node.blocks - node.blocks_free) / node.blocks
    return Text(f"{share:.0%}", "red" if share > 0.95 else "yellow" if share > 0.8 else "")


def _kept(node: ShownNode) -> str:
    """The sizes of what a node keeps outside of its cache."""
    return ", ".join(f"{store.name} {size(store.bytes)}" for store in node.stores)


def _tokens(request: ShownRequest) -> str:
    prompt = NOTHING if request.prompt_tokens is None else str(request.prompt_tokens)
    return f"{prompt}+{request.completion_tokens}"


def _path(request: ShownRequest) -> str:
    if request.outcome != "finished" or request.receipt is None:
        return request.outcome
    return request.receipt.path


# ---- links


def _rates(view: ClusterView, before: ClusterView | None) -> dict[tuple[str, str], float]:
    """Returns each link's bytes per second between the two views."""
    if before is None or view.now_s <= before.now_s:
        return {}
    known = {_key(before, link): link.bytes_total for link in before.links}
    passed_s = view.now_s - before.now_s
    found = {}
    for link in view.links:
        key = _key(view, link)
        if key in known:
            found[key] = max(0, link.bytes_total - known[key]) / passed_s  # a restarted node's count begins at 0
    return found


def _key(view: ClusterView, link: ShownLink) -> tuple[str, str]:
    node = _node(view, link.prefill)
    return ("" if node is None else node.address), link.peer


def _name(view: ClusterView, place: int | None, otherwise: str) -> str:
    node = _node(view, place)
    return otherwise if node is None else node.name


def _node(view: ClusterView, place: int | None) -> ShownNode | None:
    return view.nodes[place] if place is not None and 0 <= place < len(view.nodes) else None


def _megabytes(rate: float | None) -> str:
    return "" if rate is None else f"{rate / 1e6:.1f}"


def _ago(passed_s: float) -> str:
    passed_s = max(0.0, passed_s)
    if passed_s < 60:
        return f"{passed_s:.0f} s"
    return f"{passed_s / 60:.0f} min" if passed_s < 3600 else f"{passed_s / 3600:.0f} h"
