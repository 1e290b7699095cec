"""Converts a node's status to the gateway's own types. Pure.

Nodes may report nonsense, so numbers are checked here.
"""

import math

from baton.core.costs import StepCosts
from baton.core.decode_pace import DecodePace
from baton.core.kv_entries import ENTRY_TOKENS
from baton.core.pull_costs import ASSUMED_LOAD_BYTES_PER_S, ASSUMED_READ_BYTES_PER_S, PullCosts
from baton.gateway.fleet.node_view import NodeView
from baton.protos.v1 import node_status_pb2
from baton.rpc.convert_node import kept_bytes
from baton.rpc.revisions import revision_of

# A pair stays in these phases.
SETTLED = (node_status_pb2.PEER_PHASE_READY, node_status_pb2.PEER_PHASE_REFUSED)
# A node that has loaded fewer tokens than this has not measured how fast it loads.
_MEASURED_TOKENS = 4096
# No drafts make a step so much longer, or give so many tokens.
_PACE_MAX = 100.0


def too_slow(peer: node_status_pb2.PeerState) -> bool:
    """Whether the pair was refused only for its slow link, which may be faster later."""
    return peer.phase == node_status_pb2.PEER_PHASE_REFUSED and all(item.field == "link" for item in peer.mismatches)


def refuses_for_good(peer: node_status_pb2.PeerState) -> bool:
    """Whether the two nodes can never be a pair."""
    return peer.phase == node_status_pb2.PEER_PHASE_REFUSED and not too_slow(peer)


def load_of(status: node_status_pb2.NodeStatus) -> tuple[object, ...]:
    """The load that a status reports, for comparison with that of another status."""
    work = status.requests_running, status.requests_waiting, status.tokens_waiting, status.requests_total
    return status.info.incarnation, *work, status.decode_rows, status.blocks_free, list(status.blocks_open)


def has_requests(status: node_status_pb2.NodeStatus) -> bool:
    """Whether the node is busy with requests, or has some waiting."""
    return bool(status.requests_running or status.requests_waiting or status.decode_rows)


def kept_kind(status: node_status_pb2.NodeStatus) -> tuple[object, ...] | None:
    """The key that must be equal for two nodes to pull KV from each other; None: the node does not pull or send."""
    info = status.info
    if not status.stores:
        return None
    split = info.tensor_parallel_size, info.expert_parallel, info.attention_data_parallel
    ranks = split if info.batch_invariant else None
    drafts = info.cache_spec.HasField("draft"), info.draft_digest
    kind = info.cache_spec.dtype, ranks, info.batch_invariant, info.rows_in_order, *drafts
    return revision_of(info.model), info.model.content_digest, *kind


def shared_store(status: node_status_pb2.NodeStatus) -> bytes:
    """The key that must be equal for two nodes to read each other's KV in one store; empty: the node shares none."""
    return next((store.shared for store in status.stores if store.shared), b"")


def has_files(status: node_status_pb2.NodeStatus) -> bool:
    """Whether the node keeps KV in files."""
    return any(store.name == "file" for store in status.stores)


def seconds_of(reported: float) -> float:
    """A number that a node reported; 0 if it is negative, infinite or NaN."""
    return reported if 0 <= reported < math.inf else 0.0


def to_view(
    address: str,
    revision: str,
    status: node_status_pb2.NodeStatus,
    costs: StepCosts | None,
) -> NodeView:
    """The view of an open node that has nothing but its status: no room, no peers, and no requests sent since."""
    info = status.info
    per_token, per_request = kept_bytes(info.cache_spec)
    return NodeView(
        address=address,
        incarnation=info.incarnation,
        revision=revision,
        open=True,
        max_context_tokens=info.max_context_tokens,
        block_size=info.cache_shape.block_size,
        room_tokens=0,
        requests=status.requests_running + status.requests_waiting,
        tokens_waiting=status.tokens_waiting,
        ready_peers=frozenset(),
        costs=costs,
        backlog_s=seconds_of(status.backlog_s),
        decode_rows=status.decode_rows,
        context_tokens=status.context_tokens,
        max_batch_requests=status.max_batch_requests,
        max_batch_tokens=status.max_batch_tokens,
        kv_bytes_per_token=per_token,
        state_bytes=per_request,
        load_token_s=_load_token_s(status, per_token),
        read_token_s=_read_token_s(status, per_token),
        pull_costs=_pull_costs(status),
        pace=_pace(status),
    )


def _pace(status: node_status_pb2.NodeStatus) -> DecodePace | None:
    """The effect of draft tokens on the node's decode steps; None: no speculation, or the report is nonsense."""
    reported = status.guessed_step_ratio, status.guessed_step_tokens, status.guessed_prompt_step_ratio
    pace = DecodePace(*map(seconds_of, reported))
    return pace if min(pace) > 0.0 and max(pace) <= _PACE_MAX and pace.tokens >= 1.0 else None


def _pull_costs(status: node_status_pb2.NodeStatus) -> PullCosts | None:
    """The measured cost of the node's KV pulls; None: none measured, or the report is nonsense."""
    fixed_s, byte_s = seconds_of(status.kv_pull_fixed_s), seconds_of(status.kv_pull_byte_s)
    return PullCosts(fixed_s, byte_s) if byte_s else None


def _load_token_s(status: node_status_pb2.NodeStatus, bytes_per_token: int) -> float:
    """Time to load a token's KV from outside of the cache, as the node has measured it or as it may at least be."""
    tokens, seconds = status.kv_loaded_tokens_total, seconds_of(status.kv_load_s_total)
    is_measured = tokens >= _MEASURED_TOKENS and seconds > 0
    return seconds / tokens if is_measured else bytes_per_token / ASSUMED_LOAD_BYTES_PER_S


def _read_token_s(status: node_status_pb2.NodeStatus, bytes_per_token: int) -> float:
    """Time to read a token's KV from files or a shared store into host memory, as measured or assumed."""
    tokens = sum(store.reads_total for store in status.stores) * ENTRY_TOKENS
    seconds = sum(seconds_of(store.read_s_total) for store in status.stores)
    is_measured = tokens >= _MEASURED_TOKENS and seconds > 0
    return seconds / tokens if is_measured else bytes_per_token / ASSUMED_READ_BYTES_PER_S
