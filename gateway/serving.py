"""Requests from admission to their last message, whichever door they came through. Knows no grpc.

Owns what all requests share: how many may run, the counters, and what becomes of them when the process ends.
"""

import asyncio
import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from baton.config import GatewaySettings
from baton.errors import BatonError, DeadlineExceeded, Draining, Overloaded
from baton.types import Path, Usage
from gateway.cluster import Cluster
from gateway.handover import HandOver, Request
from gateway.model import ServedModel
from gateway.old_receipt import ReceiptDraft
from gateway.old_reply import Reply, Write
from gateway.validate import check_prompt, check_prompt_given, check_sampling
from protos.baton.v1 import generation_pb2 as pb

log = logging.getLogger("baton")


@dataclass
class Counters:
    """Since the start of the process; a cancelled request counts as failed."""

    finished: int = 0
    failed: int = 0
    remote: int = 0
    local: int = 0


class Serving:
    """Serves requests until `drain`."""

    def __init__(self, settings: GatewaySettings, model: ServedModel, cluster: Cluster) -> None:
        self.model = model
        self.counters = Counters()
        self._settings = settings
        self._cluster = cluster
        self._running: dict[asyncio.Task[object], BatonError | None] = {}  # the error that ends it early
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    @property
    def running(self) -> int:
        return len(self._running)

    async def generate(self, request: pb.GenerateRequest, write: Write, *, budget_s: float | None) -> None:
        """Serves one request in the current task; `write` gets its messages. Cancel the task to cancel the request.

        Raises:
            BatonError: why it cannot be finished.
        """
        with self._admitted() as task:
            limit_s = self._settings.request_timeout_s
            timeout_s = limit_s if budget_s is None else min(budget_s, limit_s)
            draft = ReceiptDraft()
            try:
                async with asyncio.timeout(timeout_s) as limit:
                    await self._serve(request, write, draft, timeout_s)
            except asyncio.CancelledError:
                ended_by = self._running[task]
                if ended_by is None:
                    raise
                task.uncancel()
                raise ended_by from None
            except TimeoutError:
                if not limit.expired():
                    raise
                what = f"the request was not finished within its {timeout_s:.3g} s"
                why = f" ({draft.troubles})" if draft.troubles else ""
                raise DeadlineExceeded(what + why, cure="allow it more time") from None

    async def drain(self, grace_s: float) -> None:
        """Refuses new requests, waits for those that run, and ends what is left with an error."""
        self._draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("%d request(s) did not finish within the %.0f s of the drain", self.running, grace_s)
        for task in self._running:
            self._running[task] = Draining("the gateway is going away", cure="send the request again")
            task.cancel()

    @contextmanager
    def _admitted(self) -> Iterator[asyncio.Task[object]]:
        """Counts the current task as a running request.

        Raises:
            Draining, Overloaded: it may not run.
        """
        if self._draining:
            raise Draining("the gateway is draining", cure="send the request to another gateway", retry_after_s=1.0)
        limit = self._settings.max_concurrent_requests
        if len(self._running) >= limit:
            cure = "try again later, or raise BATON_MAX_CONCURRENT_REQUESTS"
            raise Overloaded(f"{limit} requests are running already", cure=cure, retry_after_s=1.0)
        task = asyncio.current_task()
        assert task is not None
        self._running[task] = None
        self._idle.clear()
        finished = False
        try:
            yield task
            finished = True
        finally:
            del self._running[task]
            if not self._running:
                self._idle.set()
            self.counters.finished += finished
            self.counters.failed += not finished

    async def _serve(self, message: pb.GenerateRequest, write: Write, draft: ReceiptDraft, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        request = await self._check(message, deadline=started_at + timeout_s)
        detokenizer = self.model.codec.detokenizer(request.prompt)
        reply = Reply(request.request_id, request.sampling, detokenizer, write, loop.time)
        finish = await HandOver(request, self._settings, self._cluster, reply, draft).run()
        self.counters.remote += draft.path is Path.REMOTE
        self.counters.local += draft.path is Path.LOCAL
        usage = Usage(
            prompt_tokens=len(request.prompt),
            completion_tokens=reply.completion_tokens,
            cached_tokens=min(draft.cached_tokens, len(request.prompt)),
        )
        first_token_at = reply.first_token_at if reply.first_token_at is not None else loop.time()
        receipt = draft.finish(first_token_s=first_token_at - started_at, total_s=loop.time() - started_at)
        await reply.end(finish, usage, receipt)
        log.debug("%s: %d tokens, %s", request.request_id, reply.completion_tokens, receipt.why)

    async def _check(self, message: pb.GenerateRequest, *, deadline: float) -> Request:
        """The request as it can be served.

        Raises:
            InvalidRequest, UnknownModel: it cannot.
        """
        self.model.check_name(message.model)
        check_prompt_given(message)
        sampling = check_sampling(message, self.model)
        if message.WhichOneof("prompt") == "text":
            prompt = await self.encode(message.text)
        else:
            prompt = list(message.token_ids.ids)
        check_prompt(prompt, self.model, max_context_tokens=self._cluster.max_context_tokens)
        return Request(
            request_id=message.request_id or f"req-{uuid.uuid4().hex}",
            prompt=prompt,
            sampling=sampling,
            cache_salt=message.cache_salt,
            deadline=deadline,
        )

    async def encode(self, text: str) -> list[int]:
        """Tokenizes in a thread, so that a long text holds up nobody's next token."""
        return await asyncio.to_thread(self.model.codec.encode, text)

    async def decode(self, token_ids: list[int]) -> str:
        """Likewise."""
        return await asyncio.to_thread(self.model.codec.decode, token_ids)
