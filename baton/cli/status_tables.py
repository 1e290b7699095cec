"""Formats a cluster's status as tables and lines for a terminal."""

from collections.abc import Callable, Iterator, Sequence

from google.protobuf.message import Message
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from baton.cli.node_reports import members, node_name, node_role, peer_phase
from baton.cli.sizes import mib
from baton.core.errors import shortened
from baton.core.kv_entries import ENTRY_TOKENS
from baton.core.limits import TOPOLOGY_LABELS_MAX
from baton.core.log_lines import escaped
from baton.protos.v1 import node_status_pb2, operations_pb2
from baton.rpc.revisions import describe_revision, mixture, revision_of

_COLUMNS = 80
_DIGITS = 12  # shown of a revision
_ADAPTERS_MAX, _ADAPTER_NAME_MAX = 16, 64  # shown of one node
_LABEL_MAX = 64  # characters shown of a topology label


def render(cluster: operations_pb2.ClusterStatusResponse) -> Group:
    """Formats the status in at most 80 columns, unless names are long."""
    cluster = _escaped(cluster)
    nodes = cluster.nodes
    version = f" ({cluster.package_version})" if cluster.package_version else ""
    parts: list[RenderableType] = [
        Text(
            f"{cluster.gateway}{version}: {cluster.requests_running} running, {cluster.requests_finished} finished, "
            f"{cluster.requests_failed} failed\n"
            f"prompts prefilled remotely {cluster.remote_total}, locally {cluster.local_total}"
        ),
        *map(Text, _workers(cluster.workers)),
        Text(),
        _nodes_table(nodes),
        Text(),
    ]
    parts += [Text(f"{node_name(node)}: {node.detail}", style="red") for node in nodes if not node.reachable]
    if mixed := mixture(members(cluster)):
        parts.append(Text(mixed, style="yellow"))
    parts += [Text(escaped(warning), style="yellow") for warning in cluster.warnings]
    parts += [Text(line) for line in _described(nodes, _model)]
    parts += [Text(line) for line in _described([node for node in nodes if _version(node)], _release)]
    parts += [Text(line) for line in _described([node for node in nodes if node.status.info.topology], _topology)]
    parts += [Text(line) for line in _described([node for node in nodes if node.status.adapters], _adapters)]
    parts += [Text(line) for line in _described([node for node in nodes if node.reachable], _work)]
    speculating = [node for node in nodes if node.reachable and node.status.drafted_tokens_total]
    parts += [Text(line) for line in _described(speculating, _drafts)]
    balanced = [node for node in nodes if node.reachable and node.status.HasField("expert_balance")]
    parts += [Text(line) for line in _described(balanced, _experts)]
    parts += [Text(line) for line in _described([node for node in nodes if node.status.stores], _stores)]
    pairs = [(node, peer) for node in nodes for peer in node.status.peers if _is_prefill(node)]
    if pairs:
        parts += [Text(), _pairs_table(pairs, nodes)]
    for node, peer in pairs:
        if _is_lost(node, peer, nodes):
            continue
        style = "" if peer.phase == node_status_pb2.PEER_PHASE_READY else "red"
        both = f"{node_name(node)} and {peer.name}"
        if peer.detail:
            parts.append(Text(f"{both}: {peer.detail}", style=style))
        if peer.kv_converted:
            parts.append(Text(f"{both}: KV is converted, {peer.kv_converted}"))
        for item in peer.mismatches:
            parts.append(Text(f"{both}: {item.field}: {item.ours} and {item.theirs}; {item.cure}", style="red"))
    return Group(*parts)


def _workers(workers: Sequence[operations_pb2.WorkerLoad]) -> Iterator[str]:
    """Describes the gateway's processes in one line; nothing for a gateway that does not report them."""
    if not workers:
        return
    busiest = max(workers, key=lambda worker: worker.busy_share)
    number = "1 worker" if len(workers) == 1 else f"{len(workers)} workers, the busiest"
    rate = sum(worker.tokens_per_s for worker in workers)
    limit = f"; one worker's limit: about {busiest.limit_tokens_per_s:,}" if busiest.limit_tokens_per_s else ""
    yield f"{number} {100 * busiest.busy_share:.0f} % busy, {rate:,} tokens/s{limit}"


def _escaped(cluster: operations_pb2.ClusterStatusResponse) -> operations_pb2.ClusterStatusResponse:
    """Returns a copy without control characters, which the names that nodes choose may contain."""
    copy = operations_pb2.ClusterStatusResponse()
    copy.CopyFrom(cluster)
    _escape(copy)
    return copy


def _escape(message: Message) -> None:
    for field, value in message.ListFields():
        if isinstance(value, str):
            setattr(message, field.name, escaped(value))
        elif isinstance(value, Message):
            _escape(value)
        elif field.message_type is not None:
            for each in value:
                _escape(each)
        elif field.type == field.TYPE_STRING:
            value[:] = map(escaped, value)


def _nodes_table(nodes: Sequence[operations_pb2.NodeReport]) -> Table:
    table = _table()
    for name in ("node", "role", "state"):
        table.add_column(name, overflow="fold")
    for name in ("running", "waiting", "blocks used"):
        table.add_column(name, justify="right")
    table.add_column("address", overflow="fold")
    for node in nodes:
        status = node.status
        state = "draining" if status.draining else "ready"
        cells = (
            node_name(node),
            node_role(node),
            state if node.reachable else _gone(node),
            str(status.requests_running),
            str(status.requests_waiting),
            f"{status.blocks_total - status.blocks_free}/{status.blocks_total}",
            node.address,
        )
        table.add_row(*map(escape, cells), style=None if node.reachable else "red")
    return table


def _table() -> Table:
    return Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)


def _described(
    nodes: Sequence[operations_pb2.NodeReport], describe: Callable[[node_status_pb2.NodeStatus], str]
) -> list[str]:
    """Returns a line, or two if it is long, for each group of nodes with the same description."""
    alike: dict[str, list[str]] = {}
    for node in nodes:
        if node.status.info.model.name:  # otherwise it has never been reached
            alike.setdefault(describe(node.status), []).append(node_name(node))
    return [_described_line(", ".join(names), what) for what, names in alike.items()]


def _described_line(names: str, what: str) -> str:
    line = f"{names}: {what}"
    return line if len(line) <= _COLUMNS else f"{names}:\n  {what}"


def _model(status: node_status_pb2.NodeStatus) -> str:
    info = status.info
    ranks = info.tensor_parallel_size or 1
    own = " with requests of their own" if info.attention_data_parallel else ""
    return (
        f"{info.model.name}, KV {info.cache_shape.layout} x {info.cache_shape.block_size} in "
        f"{info.cache_spec.dtype}, {ranks} rank{'s' if ranks > 1 else ''}{own}{_context(info)}"
    )


def _context(info: node_status_pb2.NodeInfo) -> str:
    """Describes the context limit of a node that takes shorter requests than its model could."""
    if info.max_context_tokens >= info.model_context_tokens:
        return ""
    return f", requests of up to {info.max_context_tokens:,} of the model's {info.model_context_tokens:,} tokens"


def _release(status: node_status_pb2.NodeStatus) -> str:
    model = status.info.model
    return f"Baton {status.info.package_version}, weights {describe_revision(revision_of(model), model.revision_name)}"


def _topology(status: node_status_pb2.NodeStatus) -> str:
    labels = status.info.topology[:TOPOLOGY_LABELS_MAX]
    return f"at {', '.join(shortened(each, _LABEL_MAX) for each in labels)}"


def _adapters(status: node_status_pb2.NodeStatus) -> str:
    """Lists the first adapters by name, with the first digits of their revisions; `--json` has all of them."""
    listed = [
        f"{shortened(each.name, _ADAPTER_NAME_MAX)} ({each.revision[:_DIGITS]})"
        for each in status.adapters[:_ADAPTERS_MAX]
    ]
    more = len(status.adapters) - len(listed)
    return f"adapters {', '.join(listed)}{f' and {more} more' if more else ''}"


def _experts(status: node_status_pb2.NodeStatus) -> str:
    """Describes how evenly the ranks share the experts' tokens."""
    balance = status.expert_balance
    copies = f"; {balance.redundant_experts} redundant" if balance.redundant_experts else ""
    if not balance.imbalance_max:
        return f"experts: whole ones on each rank, no tokens yet{copies}"
    shares = [tokens / sum(balance.rank_tokens) for tokens in balance.rank_tokens]
    return (
        f"experts: {100 * min(shares):.0f} to {100 * max(shares):.0f} % a rank; busiest {balance.imbalance_mean:.2f} x "
        f"mean, at worst {balance.imbalance_max:.2f} x{copies}"
    )


def _stores(status: node_status_pb2.NodeStatus) -> str:
    """Describes the KV that is kept outside of the cache."""
    described = []
    for store in status.stores:
        damaged = f", {store.damaged_total} damaged" if store.damaged_total else ""
        failed = f", {store.failed_total} calls failed" if store.failed_total else ""
        read = ENTRY_TOKENS * store.loaded_total
        # What comes from other nodes is counted here, and kept in host memory.
        name = "other nodes" if store.name == "peer" else f"{store.name} {mib(store.bytes)}"
        described.append(f"{name}, {read:,} tokens read back{damaged}{failed}")
    speed = ""
    if status.kv_load_s_total > 0 and status.kv_loaded_tokens_total:
        speed = f"; loaded at {status.kv_loaded_tokens_total / status.kv_load_s_total:,.0f} tokens/s"
    if status.kv_pull_byte_s > 0:
        fixed_ms, gigabytes_per_s = 1e3 * status.kv_pull_fixed_s, 1e-9 / status.kv_pull_byte_s
        speed += f"; a pull takes {fixed_ms:.1f} ms and {gigabytes_per_s:.2g} GB/s"
    return f"KV kept: {'; '.join(described)}{speed}"


def _work(status: node_status_pb2.NodeStatus) -> str:
    steps = f"up to {status.max_batch_tokens} tokens, {status.max_batch_requests} requests a step"
    waiting = f"{status.tokens_waiting} prompt tokens wait"
    if status.backlog_s:
        waiting = f"{status.backlog_s:.2f} s of prompts wait"
    return f"{steps}; {status.decode_rows} decoding; {waiting}"


def _drafts(status: node_status_pb2.NodeStatus) -> str:
    share = status.accepted_tokens_total / status.drafted_tokens_total
    return f"{100 * share:.0f} % of {status.drafted_tokens_total:,} draft tokens accepted"


def _pairs_table(
    pairs: Sequence[tuple[operations_pb2.NodeReport, node_status_pb2.PeerState]],
    nodes: Sequence[operations_pb2.NodeReport],
) -> Table:
    table = _table()
    for name in ("prefill", "decode", "state", "transport"):
        table.add_column(name, overflow="fold")
    for name in ("GB/s", "us", "MiB sent", "segments"):
        table.add_column(name, justify="right")
    for node, peer in pairs:
        state = "lost" if _is_lost(node, peer, nodes) else peer_phase(peer)
        cells = (
            node_name(node),
            peer.name,
            state,
            peer.transport,
            f"{peer.gigabytes_per_s:.2f}",
            f"{peer.latency_s * 1e6:.0f}",
            f"{peer.bytes_total / (1 << 20):.1f}",
            str(peer.segments_total),
        )
        table.add_row(*map(escape, cells), style=None if state == "ready" else "red")
    return table


def _gone(node: operations_pb2.NodeReport) -> str:
    """Returns the state of a node that cannot be reached."""
    if node.status.HasField("loading"):
        return "loading"
    return "lost" if node.status.info.name else "unreachable"


def _is_lost(
    node: operations_pb2.NodeReport, peer: node_status_pb2.PeerState, nodes: Sequence[operations_pb2.NodeReport]
) -> bool:
    """Whether one end of the pair is lost, so that the prefill node's last report about the pair is out of date."""
    ends = (node, *(each for each in nodes if peer.incarnation == each.status.info.incarnation != 0))
    return not all(end.reachable for end in ends)


def _version(node: operations_pb2.NodeReport) -> str:
    return node.status.info.package_version


def _is_prefill(node: operations_pb2.NodeReport) -> bool:
    return node.status.info.role == node_status_pb2.ROLE_PREFILL
