"""Writes docs/tracing.md from the table of spans; `make docs` calls it."""

from pathlib import Path

from baton.tracing.declared import EVENTS, MEANINGS, SPANS, SpanType
from baton.tracing.environment import DEFAULT_RATIO

PAGE = Path(__file__).resolve().parent / "tracing.md"

_READ = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "the collector: `http://host:4317` or `https://host:4317`",
    "OTEL_EXPORTER_OTLP_HEADERS": "sent with each call, such as a key",
    "OTEL_EXPORTER_OTLP_CERTIFICATE": "file with the CA of the collector",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "`grpc`; any other is an error at the start",
    "OTEL_SERVICE_NAME": "name of the gateway in its resource",
    "OTEL_RESOURCE_ATTRIBUTES": "attributes of the gateway's resource; nodes' spans have them too",
    "OTEL_SDK_DISABLED": "`true`: no traces",
    "OTEL_TRACES_EXPORTER": "`none`: no traces",
    "OTEL_TRACES_SAMPLER_ARG": "share of the requests without a caller's trace that are exported, from 0 to 1",
    "OTEL_TRACES_SAMPLER": "`parentbased_traceidratio`, the default, exports that share of them, "
    "`parentbased_always_on` all, `parentbased_always_off` none",
}
_VARIABLES = "\n".join(
    ["| variable | meaning |", "|---|---|", *(f"| `{name}` | {what} |" for name, what in _READ.items())]
)

_INTRODUCTION = f"""# Traces

A gateway exports one OpenTelemetry trace per request, by OTLP over gRPC, to any collector:

```sh title="needs several machines"
OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4317 baton gateway --prefill prefill:7001 --decode decode:7002
```

Nodes need no variable and reach no collector. They send the times of their work to the gateway with other messages, and
the gateway makes the spans of all stages. So a trace is complete even if a node died, and one process decides whether
it is exported.

Each span has the resource of the process that did the work: `service.name` is `baton-gateway`, `baton-prefill` or
`baton-decode`, `service.instance.id` the name of the node. Log lines of requests have the `trace_id`.

## Which requests

A request with a valid `traceparent` (HTTP header or gRPC metadata) is part of its caller's trace, and is exported if
the caller's trace is sampled; `tracestate` is passed on. Of all other requests, the share `OTEL_TRACES_SAMPLER_ARG` is
exported, {DEFAULT_RATIO:g} by default. A request is also exported, after it has ended, if it

- failed, or was not served within its deadline (a client error or a refusal is not a failure),
- missed its TTFT or TPOT, its own or that of `--ttft-ms` and `--tpot-ms`,
- was retried, on another node or the same one.

`baton.trace.kept_for` gives the reason. A retry is an event of the request. The next attempt links to the lost one, and
the next prefill links to the lost prefill.

## Variables

The gateway reads these variables of OpenTelemetry:

{_VARIABLES}

Each `OTEL_EXPORTER_OTLP_` variable also exists as `OTEL_EXPORTER_OTLP_TRACES_...`, which wins.

Kubernetes' network policies block its port until `tracing.endpoint` or the component `tracing`
[opens it](cluster-security.md#traces). Arize Phoenix stores neither links nor resources: only `baton.node` says
where a span was.

A slow or missing collector costs traces, never a request. Each gateway process holds at most 16 MiB of traces and drops
others. `baton_traces_total` counts traces by what happened to them. Log lines say when export fails and works again.

## Cost

Exporting a request costs the building and encoding of its spans, once. Decoding is one span, so tokens cost nothing.
[tracing.md](../bench/results/tracing.md) measures the CPU time that traces add to a real gateway,
[tracing_cost.md](../bench/results/tracing_cost.md) its parts.

## What traces do not have

- Prompts, outputs and keys. `baton.client` is the name of a client, and error texts are those of log lines.
- A span per token or per engine step; [metrics](metrics.md) have their distributions.
- Exact times of nodes. The gateway places a node's clock on its own by the fastest message and its answer. So all spans
  of a node may be shifted by up to half of that round trip.
- Each chunk of a very long prompt. Beyond 32 chunks, neighbours share one span, which has `baton.merged`.
- The chunks of a prompt that a decode node computes, if the node is lost before the first token.
- Traces that a killed gateway held. OTLP over HTTP. Metrics or logs by OTLP.

`make docs` writes this page from `baton/tracing/declared.py`.
"""


def page() -> str:
    """The page's text."""
    return "\n".join([_INTRODUCTION, _spans(), _events(), _attributes()])


def _spans() -> str:
    rows = [_row(span) for span in SPANS]
    return "\n".join(["## Spans", "", "| span | process | part of | meaning |", "|---|---|---|---|", *rows, ""])


def _row(span: SpanType) -> str:
    return f"| `{span.name}` | {span.role} | {span.parent or 'the caller'} | {span.meaning} |"


def _events() -> str:
    rows = [f"| `{name}` | {meaning} |" for name, meaning in EVENTS.items()]
    return "\n".join(["## Events", "", "| event | meaning |", "|---|---|", *rows, ""])


def _attributes() -> str:
    rows = []
    for attribute, meaning in MEANINGS.items():
        users = [f"`{span.name}`" if span.parent else "the request" for span in SPANS if attribute in span.attributes]
        rows.append(f"| `{attribute}` | {meaning} | {', '.join(users) or 'events'} |")
    return "\n".join(["## Attributes", "", "| attribute | meaning | of |", "|---|---|---|", *rows, ""])


if __name__ == "__main__":
    PAGE.write_text(page())
