"""Runs one admitted request for pooled prompts: tokenizes it, computes its batches, and records them."""

import asyncio

from baton.core.types import AdapterRef
from baton.gateway.core.request import deadline_exceeded
from baton.gateway.observe.meter import RequestMeter
from baton.gateway.observe.request_record import RequestRecord
from baton.gateway.request.connections import Connections
from baton.gateway.request.pooling import PoolClient
from baton.gateway.serving.output_run import RunningRequest
from baton.gateway.serving.pooling import PooledAnswer, PoolingRequest, pool
from baton.gateway.text.text_work import TextWork
from baton.security.limits import LimitedPrompt
from baton.settings.gateway_config import GatewaySettings


class PoolRunner:
    """Runs the requests for pooled prompts of one process."""

    def __init__(
        self, settings: GatewaySettings, connections: Connections, texts: TextWork, meter: RequestMeter
    ) -> None:
        self._client = PoolClient(connections, max_attempts=settings.max_attempts, wait_s=settings.failover_wait_s)
        self._texts, self._meter = texts, meter

    async def run(
        self,
        running: RunningRequest,
        request: PoolingRequest,
        charge: LimitedPrompt,
        *,
        adapter: AdapterRef | None,
        timeout_s: float,
    ) -> PooledAnswer:
        """Returns the answer. `running` can be ended with an error of its own.

        Raises:
            BatonError: the request failed, took too long, or was ended.
        """
        deadline_s = running.record.started_at_s + timeout_s
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def settle(_: object) -> None:
            if not ended.done():
                ended.set_result(None)

        # The record's task is this one, so that `abort` and `drain` can end the work with their own error.
        working = asyncio.create_task(self._answer(running.record, request, charge, adapter, deadline_s))
        working.add_done_callback(settle)
        try:
            async with asyncio.timeout_at(deadline_s):
                await running.until(ended)
            return await working
        except TimeoutError:
            raise deadline_exceeded(timeout_s) from None
        finally:
            working.cancel()
            await asyncio.wait([working])

    async def _answer(
        self,
        record: RequestRecord,
        request: PoolingRequest,
        charge: LimitedPrompt,
        adapter: AdapterRef | None,
        deadline_s: float,
    ) -> PooledAnswer:
        prompts = await self._texts.run(request.size_bytes, request.tokenize)
        record.prepared()
        charge.has(sum(len(prompt.token_ids) for prompt in prompts))
        record.admitted()
        answer, batches = await pool(self._client, request, prompts, adapter=adapter, deadline_s=deadline_s)
        for batch in batches:
            self._meter.pooled(
                prompt_tokens=batch.prompt_tokens,
                queue_s=batch.response.queue_s,
                prefill_s=batch.response.pool_s,
                retries=batch.retries,
            )
        record.pooled(batches)
        return answer
