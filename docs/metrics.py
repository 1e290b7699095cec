"""Writes docs/metrics.md from the table of declared metrics; `make docs` calls it."""

from pathlib import Path

from baton.metrics.declared import ALL, BASE_LABELS, METRICS, PICKER, SERVED_MODEL
from baton.metrics.metric import Label, Metric, MetricKind, ProcessRole

PAGE = Path(__file__).resolve().parent / "metrics.md"

_QUESTIONS = {
    "Are requests failing?": 'sum(rate(baton_requests_total{outcome="failed"}[5m]))',
    "99th percentile of TTFT": "histogram_quantile(0.99, sum by (le) "
    "(rate(baton_time_to_first_token_seconds_bucket[5m])))",
    "Busy share of each device": "sum by (instance) (rate(baton_engine_step_time_seconds_sum[1m]))",
    "Hit rate of the prefix cache": "sum(rate(baton_prefix_cache_hits_total[5m])) "
    "/ sum(rate(baton_prefix_cache_queries_total[5m]))",
    "KV on the wire, bytes/s": 'sum by (instance) (rate(baton_kv_transfer_bytes_total{direction="sent"}[1m]))',
    "Does anything leak?": "min_over_time(baton_kv_blocks_leaked[5m]) > 0",
}

_INTRODUCTION = f"""# Metrics

Every process serves its metrics in Prometheus' text format at `/metrics` of its own port. `--metrics-listen` sets the
port; by default it is a free one on loopback. The log and the ready file show it. A gateway also serves metrics at its
HTTP port; if keys are set, only to operators. With `--workers N`, each answer is the sum of all workers.
[Security](security.md#ports-and-pages) says what metrics reveal and who may read them.

```yaml
scrape_configs:
  - job_name: baton
    static_configs:
      - targets: [gateway:9400, prefill-0:9400, decode-0:9400]
```

Every series has the labels `{"` and `".join(BASE_LABELS)}`. If vLLM has the same metric, name and meaning are vLLM's,
with `baton_` for `vllm:`, or `baton_output_` where a request may have several outputs. Names that begin with
`gen_ai_server_` are OpenTelemetry's.

- **Label values** come from the closed sets below. Exceptions are numbers of a node's ranks, names of nodes that are
  paired now, and transports. All series with closed labels exist from the start, with the value 0.
- **Counters** begin at 0 with each process.
- **Process metrics** of prometheus_client (`process_resident_memory_bytes`, `process_cpu_seconds_total`,
  `process_open_fds`) are included, unless a gateway has several workers.
- **Selection.** `/metrics?name[]=baton_ready&name[]=baton_num_requests_running` returns only these metrics.
- **Cost.** Counting takes about a microsecond per message to a client, and as much per engine step. Everything else is
  read when it is scraped. [metrics_cost.md](../bench/results/metrics_cost.md) has the measurement.

`make docs` writes this page from `baton/metrics/declared.py`.
"""

_SECTIONS = (
    ("Every process", (*ALL, *PICKER)),
    ("Gateways and nodes", ALL),
    ("Gateway", (ProcessRole.GATEWAY,)),
    ("Prefill and decode nodes", (ProcessRole.PREFILL, ProcessRole.DECODE)),
    ("Decode nodes", (ProcessRole.DECODE,)),
    ("Endpoint picker", PICKER),
)


def page() -> str:
    """The page's text."""
    sections = [_section(title, roles) for title, roles in _SECTIONS]
    return "\n".join([_INTRODUCTION, _questions(), *sections, _labels(), _buckets()])


def _questions() -> str:
    rows = [f"| {question} | `{expression}` |" for question, expression in _QUESTIONS.items()]
    return "\n".join(["## Questions", "", "| question | expression |", "|---|---|", *rows, ""])


def _section(title: str, roles: tuple[ProcessRole, ...]) -> str:
    rows = [_row(metric) for metric in METRICS if metric.roles == roles]
    head = ["| metric | type | unit | labels | meaning |", "|---|---|---|---|---|"]
    return "\n".join([f"## {title}", "", *head, *rows, ""])


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label.name}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {metric.unit} | {labels} | {metric.meaning} |"


def _labels() -> str:
    rows = []
    for label in _all_labels():
        users = ", ".join(f"`{metric.name}`" for metric in METRICS if label in metric.labels)
        values = ", ".join(f"`{value}`" for value in label.values if value not in ("", SERVED_MODEL)) or label.meaning
        rows.append(f"| `{label.name}` | {label.meaning} | {values} | {users} |")
    head = ["| label | meaning | values | of |", "|---|---|---|---|"]
    return "\n".join(["## Labels", "", *head, *rows, ""])


def _all_labels() -> list[Label]:
    return list(dict.fromkeys(label for metric in METRICS for label in metric.labels))


def _buckets() -> str:
    used = dict.fromkeys(metric.bounds for metric in METRICS if metric.kind is MetricKind.HISTOGRAM)
    rows = []
    for bounds in used:
        users = ", ".join(f"`{metric.name}`" for metric in METRICS if metric.bounds == bounds)
        rows.append(f"- {', '.join(f'{bound:g}' for bound in bounds)}: {users}")
    return "\n".join(["## Buckets of histograms", "", *rows, ""])


if __name__ == "__main__":
    PAGE.write_text(page())
