"""The groups in which `--help` shows the settings of a role, and their order: most used first. Pure."""

from pydantic import BaseModel

from baton.settings.internal import settings_of

GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "nodes and model",
        ("model", "prefill", "decode", "pool", "model_name", "max_context_tokens", "chat_template", "local_policy"),
    ),
    ("addresses", ("listen", "http_listen", "name", "advertise", "metrics_listen", "health_listen", "workers")),
    ("device and model", ("device", "dtype", "threads", "load_format", "model_revision")),
    (
        "KV cache",
        ("kv_cache_layout", "block_size", "gpu_memory_fraction", "kv_cache_mib", "kv_cache_dtype", "prefix_cache"),
    ),
    (
        "steps",
        ("max_batch_tokens", "max_batch_requests", "attention_backend", "cuda_graphs", "batch_invariant",
         "also_decodes"),
    ),
    (
        "latency and load",
        ("ttft_ms", "tpot_ms", "refuse_late", "max_queue_s", "max_concurrent_requests", "request_timeout_s",
         "balance_roles", "sheddable", "fallbacks", "pool_metrics_port"),
    ),
    (
        "several ranks and hosts",
        ("tensor_parallel_size", "expert_parallel", "attention_data_parallel", "redundant_experts", "expert_load",
         "num_hosts", "host_rank", "leader_address"),
    ),
    ("adapters", ("adapter", "adapter_directory", "max_adapters", "max_adapter_rank", "adapter_experts")),
    ("transfer", ("transport", "kv_convert_from", "link_floor_gb_per_s", "receive_limit_gb_per_s", "segment_mib")),
    (
        "clients and their rights",
        ("api_keys", "client_tls_cert", "client_tls_key", "jwt_keys", "jwt_audience", "jwt_issuer",
         "user_special_tokens", "kv_events"),
    ),
    ("TLS inside the cluster", ("tls_cert", "tls_key", "tls_ca", "insecure")),
    (
        "logs, traces, end",
        ("log_level", "log_format", "access_log", "otlp_endpoint", "trace_sample", "trace_slow_s", "drain_grace_s",
         "ready_file"),
    ),
)  # fmt: skip


def in_groups(cls: type[BaseModel]) -> list[tuple[str, tuple[str, ...]]]:
    """The settings of one role, by the title of their group."""
    settings = settings_of(cls)
    grouped = [(title, tuple(name for name in names if name in settings)) for title, names in GROUPS]
    return [(title, names) for title, names in grouped if names]
