"""Every metric of every process: one table, from which docs/metrics.md is written and the exposition is built. Pure.

Names and meanings follow vLLM's metrics where it has the same one, with `baton_` in place of `vllm:`, or with
`baton_output_` where a request may have several. Those that begin with `gen_ai_server_` are OpenTelemetry's. Label
values come from closed sets, or are numbers of ranks or names of paired nodes, so that the number of series is bounded.
"""

from baton.core.error_codes import TABLE
from baton.metrics.metric import Label, Metric, MetricKind, Outcome, ProcessRole, SwitchOutcome

BASE_LABELS = ("role", "model_name")

ALL = (ProcessRole.GATEWAY, ProcessRole.PREFILL, ProcessRole.DECODE)
GATEWAY = (ProcessRole.GATEWAY,)
NODES = (ProcessRole.PREFILL, ProcessRole.DECODE)
DECODE = (ProcessRole.DECODE,)
PICKER = (ProcessRole.PICKER,)

REASONS = tuple(dict.fromkeys(row.error.reason for row in TABLE))
# Reason of a retry: the node was lost without an error.
LOST = "LOST"

# The label value that stands for the name of the served model.
SERVED_MODEL = "{model_name}"

_WORKER = Label("worker", "number of the gateway's process, from 0")
_BEHIND = Label("behind", "whom the tokens waited for", ("client", "gateway"))
_OPERATION = Label(
    "gen_ai_operation_name",
    "what the client asked for; embeddings: scores of pairs too",
    ("chat", "text_completion", "embeddings"),
)
_PROVIDER = Label("gen_ai_provider_name", "who serves", ("baton",))
_SERVED_MODEL = Label("gen_ai_response_model", "name of the served model", (SERVED_MODEL,))
_GEN_AI = (_OPERATION, _PROVIDER, _SERVED_MODEL)
_ERROR_TYPE = Label(
    "error_type",
    "how the request failed; empty: it did not",
    ("", *(outcome for outcome in Outcome if outcome is not Outcome.FINISHED)),
)
_OUTCOME = Label("outcome", "how the request ended", tuple(Outcome))
_SWITCH_OUTCOME = Label("outcome", "how the switch of a role ended", tuple(SwitchOutcome))
_REASON = Label("reason", "the error's reason", REASONS)
_RETRY_REASON = Label("reason", f"the error's reason; {LOST}: the node was lost", (*REASONS, LOST))
_STAGE = Label("stage", "which node failed or refused", ("prefill", "decode"))
_FINISH = Label("finish_reason", "why the output ended", ("stop", "length"))
_PATH = Label("path", "where the prompt was computed", ("remote", "local", "split"))
_REFUSAL = Label("reason", "why it did not run", ("full", "queue", "deadline", "shed"))
_PHASE = Label("state", "state of the lease", ("opening", "filling", "closing"))
_STEP = Label("kind", "what the step computed", ("prefill", "decode", "mixed"))
_LAUNCH = Label("launch", "how the step was launched", ("decode_graph", "prompt_graph", "eager"))
_TIER = Label("tier", "tier of the cache", ("device",))
_STORE = Label("store", "where KV is kept outside of the cache", ("host", "file", "mooncake", "peer"))
_ENTRY_EVENT = Label(
    "event", "what happened to an entry", ("saved", "loaded", "evicted", "damaged", "failed", "served")
)
_TRANSPORT = Label("transport", "what carries the KV of the pair, such as `rc`, `cuda_ipc`, `cma` or `tcp`")
_TRACE = Label("state", "what happened to the trace", ("exported", "dropped"))
_RANK = Label("rank", "number of the node's rank")
_LAYERS = Label("layers", "statistic over all layers", ("mean", "max"))
_DIRECTION = Label("direction", "direction of the KV", ("sent", "received"))
_PEER = Label("peer", "name of the node at the other end of the pair")
_ROLE_OF_NODE = Label("node_role", "role of the node", ("prefill", "decode"))
_NODE_STATE = Label("state", "state at this gateway", ("ready", "loading", "draining", "unusable", "unreachable"))
_PICK = Label("outcome", "how the pick ended", ("picked", "no_gateway", "shed"))
_AFFINITY = Label("affinity", "kept: its own gateway, spilled: another one, none: it has none",
                  ("kept", "spilled", "none"))  # fmt: skip
_GATEWAY_STATE = Label("state", "state at the picker", ("ready", "not_ready"))
_VERSION = Label("version", "version of the package", ())
_NODE = Label("node", "name of the node")
_REVISION = Label("revision", "revision of the node's weights; equal for equal weights")
_REVISION_NAME = Label("revision_name", "name of the revision, if the node has one for it")
_PYTHON = Label("python", "version of the interpreter", ())
_SEGMENT = Label(
    "reason",
    "why the segment was not written",
    (
        "late", "unknown_sender", "unknown_lease", "foreign_sender", "unexpected", "duplicate", "too_large",
        "malformed", "wrong_size", "digest", "seal", "mislabelled", "stale_incarnation", "out_of_range", "overlap",
        "broken",
    ),
)  # fmt: skip

_FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5)
_SLOW_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0,
)  # fmt: skip
# The buckets that OpenTelemetry's conventions for generative AI advise.
_GEN_AI_DURATION_S = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
)  # fmt: skip
_GEN_AI_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
_GEN_AI_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKENS = (1.0, 8.0, 32.0, 128.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0, 131072.0)

C, G, H = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

# fmt: off
METRICS: tuple[Metric, ...] = (
    Metric("baton_build_info", G, "",
           "1; the labels name what runs", (*ALL, *PICKER), (_VERSION, _PYTHON)),
    Metric("baton_log_lines_dropped_total", C, "lines",
           "Lines of the log that were dropped because nobody read the process's stderr in time, or its disk was full",
           (*ALL, *PICKER)),
    # ---- how full
    Metric("baton_num_requests_running", G, "requests",
           "Running requests: at a gateway, outputs on nodes or on their way; on a node, requests in engine "
           "steps", ALL),
    Metric("baton_num_requests_waiting", G, "requests",
           "Waiting requests: at a gateway for their turn, on a node for blocks or a seat", ALL),
    Metric("baton_prefill_backlog_seconds", G, "seconds",
           "Predicted time to compute all prompt tokens that wait on the node; 0 while step costs are unknown. The "
           "signal to scale prefill nodes on", NODES),
    Metric("baton_prefill_backlog_tokens", G, "tokens",
           "Prompt tokens that wait to be computed", NODES),
    Metric("baton_kv_cache_usage_perc", G, "ratio",
           "Share of KV blocks held by requests; 1 means all. Blocks held only by the prefix cache count as free",
           NODES),
    Metric("baton_kv_blocks", G, "blocks",
           "KV blocks of the node", NODES),
    Metric("baton_kv_blocks_free", G, "blocks",
           "KV blocks that no request holds", NODES),
    Metric("baton_kv_blocks_leased", G, "blocks",
           "KV blocks of requests whose KV is being received, or was computed and waits for release", NODES),
    Metric("baton_kv_blocks_leaked", G, "blocks",
           "Leaked KV blocks, held by no known request. Above 0 for longer than a scrape is a defect: restart the "
           "node and report it", NODES),
    Metric("baton_kv_leases", G, "leases",
           "Leases, which wait for the KV of prompts, by state", DECODE, (_PHASE,)),
    Metric("baton_decode_rows", G, "requests",
           "Decoding requests", NODES),
    Metric("baton_decode_context_tokens", G, "tokens",
           "Sum of the contexts of all decoding requests: keys that one token of each reads", NODES),
    # ---- requests at the gateway
    Metric("baton_requests_total", C, "requests",
           "Clients' requests that ended, by outcome. client_error: the request was wrong; "
           "cancelled: the client disconnected or aborted; refused: no capacity; failed: a "
           "fault of the cluster", GATEWAY, (_OUTCOME,)),
    Metric("baton_request_errors_total", C, "requests",
           "Requests that ended with an error, by its reason", GATEWAY, (_REASON,)),
    Metric("baton_http_errors_total", C, "requests",
           "HTTP requests that were answered with an error before they became a request to the model: wrong body, no "
           "key, unknown path", GATEWAY, (_REASON,)),
    Metric("baton_http_unknown_fields_total", C, "fields",
           "Fields of HTTP bodies that Baton does not know and accepted without effect, with unknown_fields=warn",
           GATEWAY),
    Metric("baton_requests_refused_total", C, "requests",
           "Requests that never ran, by reason. full: too many requests; queue: the wait would be too long; deadline: "
           "it would not end in time; shed: it waited and can no longer finish in time", GATEWAY, (_REFUSAL,)),
    Metric("baton_output_success_total", C, "outputs",
           "Outputs that were served to their end, by finish reason", GATEWAY, (_FINISH,)),
    Metric("baton_output_path_total", C, "outputs",
           "Outputs by where their prompt was computed. local: on their decode node; split: in two parts",
           GATEWAY, (_PATH,)),
    Metric("baton_output_retries_total", C, "attempts",
           "Failed attempts that were retried, by node and reason",
           GATEWAY, (_STAGE, _RETRY_REASON)),
    Metric("baton_output_fallbacks_total", C, "outputs",
           "Outputs whose prompt was computed on the decode node because prefill nodes had failed, by the last "
           "failure", GATEWAY, (_RETRY_REASON,)),
    Metric("baton_traces_total", C, "traces",
           "Traces chosen for export. exported: the collector has them; dropped: they are lost, because it was "
           "slow, gone or refused them", GATEWAY, (_TRACE,)),
    Metric("baton_nodes", G, "nodes",
           "Nodes of the gateway by role and state", GATEWAY, (_ROLE_OF_NODE, _NODE_STATE)),
    Metric("baton_node_info", G, "",
           "1 for each node that the gateway reaches; the labels name what runs there",
           GATEWAY, (_NODE, _ROLE_OF_NODE, _VERSION, _REVISION, _REVISION_NAME)),
    Metric("baton_serving_versions", G, "versions",
           "Versions of Baton that serve at the same time: of the nodes that work on requests, and this gateway's. "
           "Above 1 during an upgrade", GATEWAY),
    Metric("baton_serving_revisions", G, "revisions",
           "Revisions of the weights that serve at the same time. Above 1 while one replaces another", GATEWAY),
    Metric("baton_workers", G, "processes",
           "Processes of this gateway (`--workers`); every metric is the sum of all", GATEWAY),
    Metric("baton_worker_busy_ratio", G, "",
           "Share of the last 10 s in which the event loop of one process of this gateway worked. Near 1, its tokens "
           "wait for it", GATEWAY, (_WORKER,)),
    Metric("baton_generation_tokens_merged_total", C, "tokens",
           "Tokens that were merged into a message with an earlier one, by who was behind. gateway: this process had "
           "too much work; more `--workers` or gateways help", GATEWAY, (_BEHIND,)),
    Metric("baton_ready", G, "",
           "1 if new requests can be served: the nodes for them are there, and the gateway is not draining", GATEWAY),
    # ---- endpoint picker
    Metric("baton_picker_picks_total", C, "requests",
           "Requests of the proxy, by what the picker answered. no_gateway: none that was allowed is ready; shed: "
           "requests wait on all of them, and this one is sheddable", PICKER, (_PICK,)),
    Metric("baton_picker_picks_by_affinity_total", C, "requests",
           "Requests that got a gateway, by whether it is the one that their session or prompt belongs to",
           PICKER, (_AFFINITY,)),
    Metric("baton_picker_failovers_total", C, "requests",
           "Requests that a gateway other than the first one picked served, as the proxy reported", PICKER),
    Metric("baton_picker_gateways", G, "gateways",
           "Gateways that were found, by state", PICKER, (_GATEWAY_STATE,)),
    # ---- tokens
    Metric("baton_prompt_tokens_total", C, "tokens",
           "Prompt tokens: at a gateway, of outputs that have begun; on a node, those computed there", ALL),
    Metric("baton_generation_tokens_total", C, "tokens",
           "Generated tokens: at a gateway, those sent to clients; on a node, those sampled there", ALL),
    Metric("baton_prefix_cache_queries_total", C, "tokens",
           "Tokens looked up in the node's prefix cache, each time a request gets blocks",
           NODES, (_TIER,)),
    Metric("baton_prefix_cache_hits_total", C, "tokens",
           "Tokens found in the node's prefix cache", NODES, (_TIER,)),
    Metric("baton_kv_store_bytes", G, "bytes",
           "KV that the node keeps outside of its cache; 0 for a store that the whole cluster shares",
           NODES, (_STORE,)),
    Metric("baton_kv_store_entries_total", C, "entries",
           "Entries of 64 tokens that were saved, loaded, evicted, damaged, not saved or read in time, or served to "
           "other nodes; what has failed of `peer` are pulls",
           NODES, (_STORE, _ENTRY_EVENT)),
    Metric("baton_output_prompt_tokens", H, "tokens",
           "Prompt length of outputs that were served to their end", GATEWAY, (), _TOKENS),
    Metric("baton_output_generation_tokens", H, "tokens",
           "Length of outputs that were served to their end", GATEWAY, (), _TOKENS),
    # ---- times of requests at the gateway
    Metric("baton_time_to_first_token_seconds", H, "seconds",
           "From a request's arrival at the gateway until its first token is passed on", GATEWAY, (), _SLOW_S),
    Metric("baton_inter_token_latency_seconds", H, "seconds",
           "Gap between tokens of one output, as passed on; n tokens of one message count as n gaps of an n-th. The "
           "signal to scale decode nodes on", GATEWAY, (), _FAST_S),
    Metric("baton_e2e_request_latency_seconds", H, "seconds",
           "From a request's arrival at the gateway to its end, by outcome", GATEWAY, (_OUTCOME,), _SLOW_S),
    Metric("baton_request_admission_time_seconds", H, "seconds",
           "From a request's arrival at the gateway until it may run: its check, template, tokenizer, and the wait "
           "for its turn", GATEWAY, (), _SLOW_S),
    Metric("baton_output_queue_time_seconds", H, "seconds",
           "Time that an output waited on nodes, for blocks and for steps", GATEWAY, (), _SLOW_S),
    Metric("baton_output_prefill_time_seconds", H, "seconds",
           "Time to compute an output's prompt", GATEWAY, (), _SLOW_S),
    Metric("baton_output_transfer_time_seconds", H, "seconds",
           "Exposed transfer: from the sampled first token until all KV is on the decode node. Only of outputs with a "
           "hand-over", GATEWAY, (), _SLOW_S),
    Metric("baton_output_decode_time_seconds", H, "seconds",
           "From an output's first token to its end", GATEWAY, (), _SLOW_S),
    # ---- OpenTelemetry's names of the same times
    Metric("gen_ai_server_request_duration_seconds", H, "seconds",
           "`gen_ai.server.request.duration`: from a request's arrival at the gateway to its end",
           GATEWAY, (*_GEN_AI, _ERROR_TYPE), _GEN_AI_DURATION_S),
    Metric("gen_ai_server_time_to_first_token_seconds", H, "seconds",
           "`gen_ai.server.time_to_first_token`: as baton_time_to_first_token_seconds, of requests that were served to "
           "their end", GATEWAY, _GEN_AI, _GEN_AI_FIRST_TOKEN_S),
    Metric("gen_ai_server_time_per_output_token_seconds", H, "seconds",
           "`gen_ai.server.time_per_output_token`: mean time of an output's tokens after its first one, of outputs "
           "that were served to their end", GATEWAY, _GEN_AI, _GEN_AI_TOKEN_S),
    # ---- role
    Metric("baton_role_switches_total", C, "switches",
           "Requested switches of the node's role, by outcome. refused: it kept its role, because its "
           "settings, its certificate or a cool-down require it; given_up: the process was shut down meanwhile",
           NODES, (_SWITCH_OUTCOME,)),
    # ---- engine
    Metric("baton_engine_step_time_seconds", H, "seconds",
           "Duration of engine steps on the device, by what they compute. rate() of its sum over all kinds is the "
           "device's busy share", NODES, (_STEP,), _FAST_S),
    Metric("baton_engine_step_launches_total", C, "steps",
           "Engine steps by launch: as a captured CUDA graph, or eager. On a CPU, decodes padded as for a graph count "
           "as decode_graph", NODES, (_LAUNCH,)),
    Metric("baton_engine_queue_time_seconds", H, "seconds",
           "Time from a prompt's arrival in the engine until its first step", NODES, (), _SLOW_S),
    Metric("baton_engine_requests_total", C, "requests",
           "Requests that entered the engine", NODES),
    Metric("baton_engine_requests_failed_total", C, "requests",
           "Requests that ended with an error in the engine, by its reason", NODES, (_REASON,)),
    Metric("baton_engine_refused_late_total", C, "requests",
           "Requests that the engine refused because they could not meet their deadline", NODES),
    Metric("baton_num_preemptions_total", C, "preemptions",
           "Preemptions: requests that lost their blocks and must be recomputed", NODES),
    Metric("baton_spec_decode_num_draft_tokens_total", C, "tokens",
           "Draft tokens that a step verified", NODES),
    Metric("baton_spec_decode_num_accepted_tokens_total", C, "tokens",
           "Draft tokens that were accepted. Divided by the draft tokens, this is the acceptance rate", NODES),
    # ---- experts
    Metric("baton_expert_tokens_total", C, "tokens",
           "Tokens that each rank's experts computed, over all layers; a token counts once for each of its experts. "
           "Read every few seconds; 0 where ranks do not hold whole experts", NODES, (_RANK,)),
    Metric("baton_expert_imbalance", G, "",
           "Tokens of a layer's busiest rank per token of its mean rank, in the last seconds with traffic: the mean "
           "over the layers, and the largest. 1 is even; 0 where ranks do not hold whole experts", NODES, (_LAYERS,)),
    # ---- transfer
    Metric("baton_kv_transfer_bytes_total", C, "bytes",
           "KV sent or received, without headers. rate() is the GB/s in use", NODES, (_DIRECTION,)),
    Metric("baton_kv_transfer_segments_total", C, "segments",
           "Segments sent or received", NODES, (_DIRECTION,)),
    Metric("baton_kv_segments_converted_total", C, "segments",
           "Segments sent in another dtype than the cache's", NODES),
    Metric("baton_kv_segments_refused_total", C, "segments",
           "Segments received and not written. digest: corrupted in transit; late: its lease had ended",
           NODES, (_SEGMENT,)),
    Metric("baton_kv_transfer_time_seconds", H, "seconds",
           "From a lease's first segment to its last", DECODE, (), _SLOW_S),
    Metric("baton_link_info", G, "",
           "1; the labels name the transport of the pair", NODES, (_PEER, _TRANSPORT)),
    Metric("baton_link_bandwidth_bytes_per_second", G, "bytes per second",
           "Speed of the pair's link as measured when the pair was made", NODES, (_PEER,)),
    Metric("baton_link_latency_seconds", G, "seconds",
           "One-way latency of the pair's link as measured when the pair was made", NODES, (_PEER,)),
    Metric("baton_link_bytes_total", C, "bytes",
           "KV exchanged over the pair's link since the pair was made", NODES, (_PEER,)),
    Metric("baton_pairs_ready", G, "pairs",
           "Pairs with other nodes that are ready for KV", NODES),
)
# fmt: on


def metrics_of(role: ProcessRole) -> tuple[Metric, ...]:
    return tuple(metric for metric in METRICS if role in metric.roles)
