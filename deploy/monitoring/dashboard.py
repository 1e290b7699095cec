"""Writes dashboard.json, for Grafana 10 and later, from the table of rows and panels below; `make docs` calls it.

The Helm chart and the kustomize component `dashboard` have copies, since neither reads a file outside itself.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent / "dashboard.json"
_DEPLOY = FILE.parents[1]
COPIES = (
    _DEPLOY / "helm" / "baton" / "files" / "dashboard.json",
    _DEPLOY / "kustomize" / "components" / "dashboard" / "baton.json",
)

_MODEL = 'model_name=~"$model"'
_COLUMNS, _HEIGHT, _PER_ROW = 24, 8, 3


@dataclass(frozen=True)
class Panel:
    """One graph over time.

    Args:
        unit: in Grafana's words.
        lines: expressions by the legend of their lines. MODEL stands for the matcher of the chosen models.
    """

    title: str
    unit: str
    lines: dict[str, str]

    @property
    def expressions(self) -> tuple[str, ...]:
        return tuple(line.replace("MODEL", _MODEL) for line in self.lines.values())


def _quantiles(histogram: str) -> dict[str, str]:
    buckets = f"sum by (le) (rate({histogram}_bucket{{MODEL}}[$__rate_interval]))"
    return {f"p{round(100 * share)}": f"histogram_quantile({share}, {buckets})" for share in (0.5, 0.9, 0.99)}


def _rate(counter: str, *by: str, matchers: str = "MODEL") -> dict[str, str]:
    """Per second, one line for each value of the labels."""
    legend = " ".join(f"{{{{{label}}}}}" for label in by)
    return {legend: f"sum by ({', '.join(by)}) (rate({counter}{{{matchers}}}[$__rate_interval]))"}


def _sums(gauge: str, *by: str, matchers: str = "MODEL") -> dict[str, str]:
    legend = " ".join(f"{{{{{label}}}}}" for label in by)
    return {legend: f"sum by ({', '.join(by)}) ({gauge}{{{matchers}}})"}


def _of(role: str) -> str:
    return f'role="{role}",MODEL'


def _busy(role: str) -> dict[str, str]:
    return _rate("baton_engine_step_time_seconds_sum", "instance", matchers=_of(role))


_HITS = "sum by (instance) (rate(baton_prefix_cache_hits_total{MODEL}[$__rate_interval]))"
_QUERIES = "sum by (instance) (rate(baton_prefix_cache_queries_total{MODEL}[$__rate_interval]))"

ROWS: dict[str, tuple[Panel, ...]] = {
    "Traffic and SLO": (
        Panel("Requests by outcome", "reqps", _rate("baton_requests_total", "outcome")),
        Panel("Time to first token", "s", _quantiles("baton_time_to_first_token_seconds")),
        Panel("Inter-token latency", "s", _quantiles("baton_inter_token_latency_seconds")),
        Panel(
            "Tokens per second at gateways",
            "short",
            {
                "prompt": 'sum(rate(baton_prompt_tokens_total{role="gateway",MODEL}[$__rate_interval]))',
                "output": 'sum(rate(baton_generation_tokens_total{role="gateway",MODEL}[$__rate_interval]))',
            },
        ),
        Panel("Wait for admission", "s", _quantiles("baton_request_admission_time_seconds")),
        Panel(
            "Requests at gateways",
            "short",
            {
                "running": 'sum(baton_num_requests_running{role="gateway",MODEL})',
                "waiting": 'sum(baton_num_requests_waiting{role="gateway",MODEL})',
            },
        ),
    ),
    "Prefill": (
        Panel("Backlog", "s", _sums("baton_prefill_backlog_seconds", "instance", matchers=_of("prefill"))),
        Panel("Busy share of prefill nodes", "percentunit", _busy("prefill")),
        Panel("Prefill time", "s", _quantiles("baton_output_prefill_time_seconds")),
        Panel("Where prompts are computed", "ops", _rate("baton_output_path_total", "path")),
        Panel("Hit rate of the prefix cache", "percentunit", {"{{instance}}": f"{_HITS} / {_QUERIES}"}),
        Panel("Wait for a step", "s", _quantiles("baton_engine_queue_time_seconds")),
    ),
    "Decode": (
        Panel("Requests that decode", "short", _sums("baton_decode_rows", "instance", matchers=_of("decode"))),
        Panel("Busy share of decode nodes", "percentunit", _busy("decode")),
        Panel("Engine steps by launch", "ops", _rate("baton_engine_step_launches_total", "launch")),
    ),
    "Transfer and links": (
        Panel("KV transferred", "Bps", _rate("baton_kv_transfer_bytes_total", "direction")),
        Panel("Exposed transfer time", "s", _quantiles("baton_output_transfer_time_seconds")),
        Panel("Pairs that are ready", "short", _sums("baton_pairs_ready", "instance")),
        Panel("Links by transport", "short", {"{{transport}}": "count by (transport) (baton_link_info{MODEL})"}),
        Panel("KV by link", "Bps", _rate("baton_link_bytes_total", "instance", "peer")),
        Panel("Measured bandwidth", "Bps", _sums("baton_link_bandwidth_bytes_per_second", "instance", "peer")),
        Panel("Measured latency", "s", _sums("baton_link_latency_seconds", "instance", "peer")),
    ),
    "KV": (
        Panel("Share of blocks held", "percentunit", _sums("baton_kv_cache_usage_perc", "role", "instance")),
        Panel("Leases", "short", _sums("baton_kv_leases", "state")),
        Panel("Preemptions", "ops", _rate("baton_num_preemptions_total", "instance")),
        Panel("Leaked blocks", "short", _sums("baton_kv_blocks_leaked", "instance")),
        Panel("Refused segments", "ops", _rate("baton_kv_segments_refused_total", "reason")),
    ),
    "Failures, refusals and retries": (
        Panel("Errors by reason", "reqps", _rate("baton_request_errors_total", "reason")),
        Panel("Refusals by reason", "reqps", _rate("baton_requests_refused_total", "reason")),
        Panel("Retries by stage and reason", "ops", _rate("baton_output_retries_total", "stage", "reason")),
        Panel("Fallbacks to decode nodes by last failure", "ops", _rate("baton_output_fallbacks_total", "reason")),
        Panel("Errors in engines", "reqps", _rate("baton_engine_requests_failed_total", "reason")),
        Panel("Traces", "ops", _rate("baton_traces_total", "state")),
    ),
    "Nodes and versions": (
        Panel(
            "Nodes by state",
            "short",
            {"{{node_role}} {{state}}": "max by (node_role, state) (baton_nodes{MODEL})"},
        ),
        Panel("Processes by version", "short", {"{{version}}": "count by (version) (baton_build_info{MODEL})"}),
        Panel(
            "Nodes by revision of the weights",
            "short",
            {
                "{{revision_name}} {{revision}}": "count by (revision, revision_name) "
                "(max by (node, revision, revision_name) (baton_node_info{MODEL}))"
            },
        ),
        Panel("Processes by role", "short", {"{{role}}": "count by (role) (baton_build_info{MODEL})"}),
    ),
}  # fmt: skip

_VARIABLES: tuple[dict[str, Any], ...] = (
    {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
    {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "$datasource"},
        "query": {"query": "label_values(baton_build_info, model_name)", "refId": "models"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    },
)


def dashboard() -> str:
    """The dashboard's JSON."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        place = {"x": 0, "y": y, "w": _COLUMNS, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": place, "panels": []})
        y += 1
        width = _COLUMNS // _PER_ROW
        for number, panel in enumerate(row):
            down, across = divmod(number, _PER_ROW)
            place = {"x": across * width, "y": y + down * _HEIGHT, "w": width, "h": _HEIGHT}
            panels.append({"id": len(panels) + 1, "gridPos": place, **_graph(panel)})
        y += -(-len(row) // _PER_ROW) * _HEIGHT
    whole = {
        "uid": "baton",
        "title": "Baton",
        "tags": ["baton"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _VARIABLES},
        "panels": panels,
    }
    return json.dumps(whole, indent=1) + "\n"


def _graph(panel: Panel) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "$datasource"}
    targets = [
        {"refId": chr(ord("A") + number), "datasource": source, "expr": expression, "legendFormat": legend}
        for number, (legend, expression) in enumerate(zip(panel.lines, panel.expressions, strict=True))
    ]
    return {
        "type": "timeseries",
        "title": panel.title,
        "datasource": source,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


if __name__ == "__main__":
    for file in (FILE, *COPIES):
        file.write_text(dashboard())
