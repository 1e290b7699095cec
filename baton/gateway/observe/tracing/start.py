"""Creates the tracer of one gateway process. Imports OpenTelemetry's messages only if traces are exported."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.gateway.observe.tracing.tracer import Tracer
from baton.metrics.tally import Tally
from baton.settings.environment import opentelemetry_variables
from baton.settings.gateway_config import GatewaySettings
from baton.tracing.environment import read_collector
from baton.tracing.sampling import Sampling


@asynccontextmanager
async def tracing(
    settings: GatewaySettings, tally: Tally, *, instance: str, model_name: str
) -> AsyncIterator[Tracer | None]:
    """Exports traces until the end of the block; yields None if no collector is configured.

    Args:
        tally: counts exported and dropped traces.

    Raises:
        ConfigError: the endpoint is malformed.
    """
    collector = read_collector(settings.otlp_endpoint, opentelemetry_variables(), instance=instance)
    if collector is None:
        yield None
        return
    from baton.gateway.observe.tracing.export import Exporter
    from baton.gateway.observe.tracing.otlp import SpanEncoder

    sampling = Sampling(settings.trace_sample, settings.trace_slow_s)
    async with Exporter(collector, tally) as exporter:
        yield Tracer(sampling, SpanEncoder(collector.resource), model_name, exporter.put)
