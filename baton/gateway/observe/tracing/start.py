"""Creates the tracer of one gateway process. Imports OpenTelemetry's messages only if traces are exported."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.gateway.observe.tracing.tracer import Tracer
from baton.metrics.tally import Tally
from baton.settings.environment import opentelemetry_variables
from baton.tracing.environment import read_collector, read_ratio
from baton.tracing.sampling import Sampling


@asynccontextmanager
async def tracing(tally: Tally, *, instance: str, model_name: str) -> AsyncIterator[Tracer | None]:
    """Exports traces until the end of the block; yields None if no collector is configured.

    Args:
        tally: counts exported and dropped traces.

    Raises:
        ConfigError: a variable of OpenTelemetry is malformed.
    """
    variables = opentelemetry_variables()
    collector = read_collector(variables, instance=instance)
    if collector is None:
        yield None
        return
    from baton.gateway.observe.tracing.export import Exporter
    from baton.gateway.observe.tracing.otlp import SpanEncoder

    sampling = Sampling(read_ratio(variables))
    async with Exporter(collector, tally) as exporter:
        yield Tracer(sampling, SpanEncoder(collector.resource), model_name, exporter.put)
