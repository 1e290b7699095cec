"""Formats a cluster's status as the JSON object of `baton status --json`."""

from baton.cli.node_reports import members, node_role, peer_phase
from baton.protos.v1 import node_status_pb2, operations_pb2
from baton.rpc.revisions import mixture, revision_of


def to_json(cluster: operations_pb2.ClusterStatusResponse) -> dict[str, object]:
    """Returns the object that `--json` prints. Incarnations are hexadecimal, because JSON numbers would be rounded."""
    return {
        "gateway": cluster.gateway,
        "version": cluster.package_version,
        "mixed": mixture(members(cluster)),
        "requests_running": cluster.requests_running,
        "requests_finished": cluster.requests_finished,
        "requests_failed": cluster.requests_failed,
        "remote_total": cluster.remote_total,
        "local_total": cluster.local_total,
        "warnings": list(cluster.warnings),
        "workers": [
            {
                "busy_share": worker.busy_share,
                "tokens_per_s": worker.tokens_per_s,
                "limit_tokens_per_s": worker.limit_tokens_per_s or None,
            }
            for worker in cluster.workers
        ],
        "nodes": [_node_to_json(node) for node in cluster.nodes],
    }


def _node_to_json(node: operations_pb2.NodeReport) -> dict[str, object]:
    status, info = node.status, node.status.info
    return {
        "name": info.name,
        "address": node.address,
        "role": node_role(node),
        "reachable": node.reachable,
        "detail": node.detail,
        "draining": status.draining,
        "incarnation": f"{info.incarnation:x}",
        "version": info.package_version,
        "model": info.model.name,
        "topology": list(info.topology),
        "revision": revision_of(info.model),
        "revision_name": info.model.revision_name,
        "architecture": info.model.architecture,
        "dtype": info.cache_spec.dtype,
        "layout": info.cache_shape.layout,
        "block_size": info.cache_shape.block_size,
        "tensor_parallel_size": info.tensor_parallel_size or 1,
        "attention_data_parallel": info.attention_data_parallel,
        "max_context_tokens": info.max_context_tokens,
        "model_context_tokens": info.model_context_tokens,
        "blocks_total": status.blocks_total,
        "blocks_free": status.blocks_free,
        "blocks_used": status.blocks_total - status.blocks_free,
        "blocks_leased": status.blocks_leased,
        "requests_running": status.requests_running,
        "requests_waiting": status.requests_waiting,
        "requests_total": status.requests_total,
        "tokens_waiting": status.tokens_waiting,
        "backlog_s": status.backlog_s,
        "decode_rows": status.decode_rows,
        "context_tokens": status.context_tokens,
        "max_batch_tokens": status.max_batch_tokens,
        "max_batch_requests": status.max_batch_requests,
        "step_costs": _costs_to_json(status.step_costs) if status.HasField("step_costs") else None,
        "adapters": [{"name": each.name, "revision": each.revision} for each in status.adapters],
        "expert_balance": _balance_to_json(status.expert_balance) if status.HasField("expert_balance") else None,
        "gpus": [_gpu_to_json(gpu) for gpu in status.gpus],
        "stores": [_store_to_json(store) for store in status.stores],
        "kv_loaded_tokens_total": status.kv_loaded_tokens_total,
        "kv_load_s_total": status.kv_load_s_total,
        "kv_pull_fixed_s": status.kv_pull_fixed_s,
        "kv_pull_byte_s": status.kv_pull_byte_s,
        "drafted_tokens_total": status.drafted_tokens_total,
        "accepted_tokens_total": status.accepted_tokens_total,
        "prompt_tokens_total": status.prompt_tokens_total,
        "generated_tokens_total": status.generated_tokens_total,
        "preemptions": status.preemptions,
        "segments_refused": status.segments_refused,
        "segments_late": status.segments_late,
        "segments_converted": status.segments_converted,
        "peers": [_peer_to_json(peer) for peer in status.peers],
    }


def _costs_to_json(costs: node_status_pb2.StepCosts) -> dict[str, object]:
    return {
        "points": [{"tokens": point.tokens, "seconds": point.seconds} for point in costs.points],
        "key_s": costs.key_s,
        "pair_s": costs.pair_s,
        "decode_row_s": costs.decode_row_s,
        "prompt_step_s": costs.prompt_step_s,
    }


def _balance_to_json(balance: node_status_pb2.ExpertBalance) -> dict[str, object]:
    return {
        "redundant_experts": balance.redundant_experts,
        "rank_tokens": list(balance.rank_tokens),
        "imbalance_mean": balance.imbalance_mean,
        "imbalance_max": balance.imbalance_max,
    }


def _gpu_to_json(gpu: node_status_pb2.GpuState) -> dict[str, object]:
    return {
        "name": gpu.name,
        "memory_total_bytes": gpu.memory_total_bytes,
        "memory_used_bytes": gpu.memory_used_bytes,
        "busy_share": gpu.busy_share if gpu.HasField("busy_share") else None,
        "power_w": gpu.power_w if gpu.HasField("power_w") else None,
        "power_limit_w": gpu.power_limit_w if gpu.HasField("power_limit_w") else None,
    }


def _store_to_json(store: node_status_pb2.StoreState) -> dict[str, object]:
    return {
        "name": store.name,
        "entries": store.entries,
        "bytes": store.bytes,
        "loaded_total": store.loaded_total,
        "damaged_total": store.damaged_total,
        "failed_total": store.failed_total,
        "reads_total": store.reads_total,
        "read_s_total": store.read_s_total,
    }


def _peer_to_json(peer: node_status_pb2.PeerState) -> dict[str, object]:
    return {
        "name": peer.name,
        "address": peer.address,
        "incarnation": f"{peer.incarnation:x}",
        "state": peer_phase(peer),
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
