"""A node's own part of its status: everything but what the role fills in."""

from baton.node.assembly import Node
from baton.node.describe import to_step_costs
from baton.node.kv_stores import store_states, with_failed_pulls
from baton.protos.v1 import node_status_pb2
from baton.rpc.convert import adapter_to_proto
from kvtransfer.records import EntryCounters, TransferCounters

# Far longer than one iteration of the transfer thread's loop, and than the time between two reports of a rank.
STUCK_AFTER_S = 4.0


def own_status(node: Node, counters: TransferCounters, *, draining: bool) -> node_status_pb2.NodeStatus:
    """The node's status, in which the role fills in peers, leases and refusals.

    Args:
        counters: of the node's transfer, now.
    """
    load = node.engine.load()
    loaded_tokens, load_s = node.engine.loads
    drafted_tokens, accepted_tokens = node.counts.drafts
    pull_costs = None if node.pulls is None else node.pulls.mean_costs
    return node_status_pb2.NodeStatus(
        info=node.info,
        draining=draining,
        blocks_total=load.blocks_total,
        blocks_free=load.blocks_free,
        blocks_open=load.blocks_open,
        blocks_leased=load.blocks_leased,
        requests_running=load.requests_running,
        requests_waiting=load.requests_waiting,
        tokens_waiting=load.tokens_waiting,
        requests_total=load.requests_total,
        preemptions=load.preemptions,
        segments_refused=counters.refused,
        segments_late=counters.late,
        segments_converted=counters.converted,
        step_costs=to_step_costs(node.meter.costs),
        step_profile=to_step_costs(node.built.costs),
        backlog_s=load.backlog_s,
        context_tokens=load.context_tokens,
        decode_rows=load.decode_rows,
        max_batch_requests=node.limits.seats,
        max_batch_tokens=node.limits.max_batch_tokens,
        role_switches=node.switches,
        adapters=map(adapter_to_proto, node.engine.adapters.loaded),
        expert_balance=node.experts.summary(),
        gpus=node.gpus.states,
        prompt_tokens_total=node.counts.prompt_tokens,
        generated_tokens_total=node.counts.generated_tokens,
        stores=store_states(kept_entries(node, counters), shared=node.shared_store) if node.engine.has_tier else (),
        kv_loaded_tokens_total=loaded_tokens,
        kv_load_s_total=load_s,
        kv_pull_fixed_s=0.0 if pull_costs is None else pull_costs.fixed_s,
        kv_pull_byte_s=0.0 if pull_costs is None else pull_costs.byte_s,
        drafted_tokens_total=drafted_tokens,
        accepted_tokens_total=accepted_tokens,
        guessed_step_ratio=0.0 if load.pace is None else load.pace.step_ratio,
        guessed_step_tokens=0.0 if load.pace is None else load.pace.tokens,
        guessed_prompt_step_ratio=0.0 if load.pace is None else load.pace.prompt_step_ratio,
        stuck=bool(node.transfer.stuck(after_s=STUCK_AFTER_S)),
    )


def kept_entries(node: Node, counters: TransferCounters) -> EntryCounters:
    """Totals of the KV that is kept outside of the cache, with the pulls from other nodes that failed."""
    return counters.entries if node.pulls is None else with_failed_pulls(counters.entries, node.pulls.failures)
