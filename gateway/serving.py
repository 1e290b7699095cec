"""Requests from admission to their last message, for every API that admits them.

Owns what all requests share: the limit on running requests, the counters, and the drain at the end of the process.
"""

import asyncio
import logging
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from baton.config import GatewaySettings
from baton.errors import BatonError, Draining, Overloaded
from baton.types import Path
from gateway.chat.types import ChatRequest
from gateway.connections import Connections
from gateway.model import ServedModel
from gateway.request import Request, Rules, deadline_exceeded
from gateway.request_driver import RequestDriver, Write
from gateway.request_machine import RequestMachine
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

    def __init__(self, settings: GatewaySettings, model: ServedModel, connections: Connections) -> None:
        self.model = model
        self.counters = Counters()
        self.running = 0
        self._settings = settings
        self._rules = Rules(
            local_policy=settings.local_policy,
            max_attempts=settings.max_attempts,
            queue_s=settings.queue_s,
            prefill_stall_s=settings.prefill_stall_s,
            decode_stall_s=settings.decode_stall_s,
            failover_wait_s=settings.failover_wait_s,
        )
        self._connections = connections
        self._drivers: set[RequestDriver] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._ended_by: BatonError | None = None  # the error that ends all requests

    async def generate(
        self,
        message: pb.GenerateRequest,
        write: Write,
        *,
        budget_s: float | None,
        chat: ChatRequest | None = None,
    ) -> None:
        """Serves one request in the current task; `write` gets its messages. Cancel the task to cancel the request.

        Raises:
            BatonError: why it cannot be finished.
        """
        started_at_s = asyncio.get_running_loop().time()
        limit_s = self._settings.request_timeout_s
        timeout_s = limit_s if budget_s is None else min(budget_s, limit_s)
        with self._admitted():
            request = await self._check(message, started_at_s, timeout_s)
            if self._ended_by is not None:
                raise self._ended_by
            fleet = self._connections.fleet
            machine = RequestMachine(request, self._rules, fleet, self.model.tokenizer.detokenizer(request.prompt))
            driver = RequestDriver(request, machine, self._connections, write)
            self._drivers.add(driver)
            try:
                await driver.run()
            finally:
                self._drivers.discard(driver)
            log.debug("%s: %d tokens, prefilled %s", request.request_id, machine.completion_tokens, machine.path.value)
            self.counters.remote += machine.path is Path.REMOTE
            self.counters.local += machine.path is Path.LOCAL

    async def drain(self, grace_s: float) -> None:
        """Refuses new requests, waits for those that run, and ends what is left with an error."""
        self._draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("%d request(s) did not finish within the %.0f s of the drain", self.running, grace_s)
        self._ended_by = Draining("the gateway is shutting down", cure="send the request again")
        for driver in self._drivers:
            driver.end(self._ended_by)

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        """Counts a running request.

        Raises:
            Draining, Overloaded: it may not run.
        """
        if self._draining:
            raise Draining("the gateway is draining", cure="send the request to another gateway", retry_after_s=1.0)
        limit = self._settings.max_concurrent_requests
        if self.running >= limit:
            cure = "try again later, or raise BATON_MAX_CONCURRENT_REQUESTS"
            raise Overloaded(f"{limit} requests are running already", cure=cure, retry_after_s=1.0)
        self.running += 1
        self._idle.clear()
        finished = False
        try:
            yield
            finished = True
        finally:
            self.running -= 1
            if not self.running:
                self._idle.set()
            self.counters.finished += finished
            self.counters.failed += not finished

    async def _check(self, message: pb.GenerateRequest, started_at_s: float, timeout_s: float) -> Request:
        """The request as it can be served.

        Raises:
            InvalidRequest, UnknownModel, DeadlineExceeded: it cannot.
        """
        self.model.check_name(message.model)
        check_prompt_given(message)
        sampling = check_sampling(message, self.model)
        if message.WhichOneof("prompt") == "text":
            try:
                async with asyncio.timeout_at(started_at_s + timeout_s):
                    prompt = await self.encode(message.text)
            except TimeoutError:
                raise deadline_exceeded(timeout_s) from None
        else:
            prompt = list(message.token_ids.ids)
        check_prompt(prompt, self.model, max_context_tokens=self._connections.fleet.max_context_tokens)
        return Request(
            request_id=message.request_id or f"req-{uuid.uuid4().hex}",
            prompt=prompt,
            sampling=sampling,
            cache_salt=message.cache_salt,
            started_at_s=started_at_s,
            timeout_s=timeout_s,
        )

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenizes in a thread, so that a long text delays no other request's tokens."""
        return await asyncio.to_thread(self.model.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    async def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Decodes in a thread, as `encode`."""
        return await asyncio.to_thread(self.model.tokenizer.decode, token_ids, skip_special_tokens=skip_special_tokens)

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Ends running requests; their callers get `Cancelled`. Returns the ids that ran."""
        raise NotImplementedError
