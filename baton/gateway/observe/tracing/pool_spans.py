"""Builds the span of one batch of pooled prompts, and the events of its lost attempts. Pure."""

from collections.abc import Callable

from baton.gateway.request.pooling import PooledBatch
from baton.metrics.metric import ProcessRole
from baton.tracing.declared import POOL, RETRY_EVENT, Attribute
from baton.tracing.span import Event, Span, SpanPlace


def batch_span(batch: PooledBatch, parent_id: int, new_id: Callable[[], int]) -> Span:
    """The call that succeeded."""
    place = SpanPlace(ProcessRole.PREFILL, batch.node)
    span = Span(POOL.name, new_id(), parent_id, batch.called_s, batch.ended_s, place)
    span.attributes = {
        Attribute.NODE: batch.node,
        Attribute.ADDRESS: batch.address,
        Attribute.QUEUE_S: batch.response.queue_s,
        Attribute.INPUT_TOKENS: batch.prompt_tokens,
        Attribute.NODE_CACHED: batch.cached_tokens,
        Attribute.ATTEMPTS: batch.attempts,
    }
    return span


def retry_events(batch: PooledBatch) -> list[Event]:
    """An event for each lost attempt, at the time of the call that succeeded."""
    return [
        Event(batch.called_s, RETRY_EVENT, {Attribute.STAGE: retry.stage, Attribute.ERROR_TYPE: retry.reason})
        for retry in batch.retries
    ]
