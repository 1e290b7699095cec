"""Writes docs/tracing.md from the table of spans; `make docs` calls it."""

from pathlib import Path

from baton.settings.gateway_config import GatewaySettings
from baton.tracing.declared import EVENTS, MEANINGS, SPANS, SpanType

PAGE = Path(__file__).resolve().parent / "tracing.md"

_RATIO = GatewaySettings.model_fields["trace_sample"].default

_READ = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "the collector, unless `--otlp-endpoint` is set",
    "OTEL_EXPORTER_OTLP_HEADERS": "sent with each call, such as a key",
    "OTEL_EXPORTER_OTLP_CERTIFICATE": "file with the CA of the collector",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "`grpc`; any other is an error at the start, unless `--otlp-endpoint` is set",
    "OTEL_SERVICE_NAME": "name of the gateway in its resource",
    "OTEL_RESOURCE_ATTRIBUTES": "attributes of the gateway's resource; nodes' spans have them too",
    "OTEL_SDK_DISABLED": "`true`: no traces, unless `--otlp-endpoint` is set",
    "OTEL_TRACES_EXPORTER": "`none`: no traces, unless `--otlp-endpoint` is set",
}
_VARIABLES = "\n".join(
    ["| variable | meaning |", "|---|---|", *(f"| `{name}` | {what} |" for name, what in _READ.items())]
)

_INTRODUCTION = f"""# Traces

A gateway exports one OpenTelemetry trace per request, by OTLP over gRPC, to any collector:

```sh title="needs several machines"
baton gateway --prefill prefill:7001 --decode decode:7002 --otlp-endpoint http://collector:4317
```

or with `OTEL_EXPORTER_OTLP_ENDPOINT` and the other variables below. Nodes need no setting and reach no collector: they
report the times of their work to the gateway with the messages that they send anyway, and the gateway makes the spans
of all stages. So a trace is whole even where a node died, and one process decides whether it is exported. Each span has
the resource of the process whose work it is (`service.name` is `baton-gateway`, `baton-prefill` or `baton-decode`,
`service.instance.id` the name of the node). Log lines of requests have the `trace_id`.

## Which requests

A request with a valid `traceparent` (HTTP header or gRPC metadata) is part of its caller's trace, and is exported if
the caller's is sampled; `tracestate` is passed on. Of all others, `--trace-sample` is the share that is exported,
{_RATIO:g} by default. Whatever these say, the trace of a request is also exported, once it has ended, if the request

- failed, or was not served within its deadline (a client's own mistake and a refused request are no failures),
- took longer than `--trace-slow-s`, where that is set,
- was tried again, on another node or the same one.

`baton.trace.kept_for` says which of these was the reason. A retry is an event on the request; the next attempt links to
the lost one, and so does the next prefill to a lost prefill.

## Settings

[configuration.md](configuration.md) has `--otlp-endpoint`, `--trace-sample` and `--trace-slow-s`. Of OpenTelemetry's
variables the gateway reads these:

{_VARIABLES}

Each `OTEL_EXPORTER_OTLP_` variable also exists as `OTEL_EXPORTER_OTLP_TRACES_...`, which comes first.

Any collector of OTLP over gRPC will do. `make test-clients` sends the traces of a real cluster to Arize Phoenix and
reads them back from its API. Phoenix keeps neither links nor resources: there only `baton.node` says where a span was.

A collector that is slow or gone costs traces, never a request: each gateway process holds 16 MiB of traces at most, and
drops those beyond. `baton_traces_total` counts what becomes of traces. One log line says that they are not exported,
one that they are again.

## Cost

Every request has a journal, which [the page](ui.md) reads too; one that is exported also costs the building and
encoding of its spans, both once per request. Tokens cost nothing: decoding is one span.
[tracing.md](../bench/results/tracing.md) has what traces add to the CPU time of a real gateway,
[tracing_cost.md](../bench/results/tracing_cost.md) the parts of it.

## What traces do not have

- Prompts, outputs, keys: `baton.client` is the name of a client, and error texts are those of log lines.
- A span per token or per engine step; [metrics](metrics.md) have their distributions.
- Exact times of nodes. A node's clock is placed on the gateway's by the fastest message and its answer, so its spans
  may be shifted by half of what these took, in one piece.
- Spans of chunks of very long prompts one by one: beyond 32, neighbours are one span, which has `baton.merged`.
- The chunks of a prompt that a decode node computes, where it is lost before the first token, with which they come.
- The traces that a killed gateway held. OTLP over HTTP, and metrics or logs by OTLP.

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
