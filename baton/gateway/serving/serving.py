"""Serves requests of all APIs, from admission to their last message.

Owns the state that requests share: the admission queue, the counters, and the drain at the end of the process.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from baton.core.errors import Cancelled, Draining
from baton.core.memory import memory_limit_bytes
from baton.core.types import AdapterRef
from baton.gateway.core.request import Outputs
from baton.gateway.core.shared_counters import Count, Counters
from baton.gateway.observe.load import WorkerLoad, worker_loads
from baton.gateway.observe.meter import CHAT, COMPLETION, RequestMeter
from baton.gateway.observe.metrics import GatewayMetrics
from baton.gateway.observe.recent import Recent, Shown, newest_of
from baton.gateway.observe.request_record import RequestRecord, RequestRecords
from baton.gateway.observe.tracing.tracer import Tracer
from baton.gateway.request.connections import Connections
from baton.gateway.request.driver import Write
from baton.gateway.serving.admission_queue import AdmissionQueue
from baton.gateway.serving.fan_out import fan_out
from baton.gateway.serving.other_workers import OtherWorkers, SingleWorker
from baton.gateway.serving.output_run import OutputRunner, RunningRequest, Skip
from baton.gateway.serving.pool_run import PoolRunner
from baton.gateway.serving.pooling import PooledAnswer, PoolingRequest
from baton.gateway.serving.preparation import (
    CHARACTERS_PER_TOKEN,
    RequestCall,
    encode,
    fewest_tokens,
    prepare,
)
from baton.gateway.serving.validate import check_outputs, check_request_id
from baton.gateway.text.chat.types import ChatRequest
from baton.gateway.text.model import ServedModel
from baton.gateway.text.text_work import TextWork, text_budget
from baton.protos.v1 import generation_pb2 as pb
from baton.security import identity
from baton.security.limits import LimitedPrompt
from baton.settings.gateway_config import GatewaySettings
from baton.tracing.context import TraceContext

log = logging.getLogger("baton")

_BYTES_PER_TOKEN = 8  # estimated size of one decoded token and its id


class Serving:
    """Serves requests until `drain`.

    Args:
        other_workers: other processes of the same gateway, which share counters and limits; None: there are none.
        tracer: traces requests; None: they are not traced.

    Attributes:
        meter: counts requests for metrics.
        metrics: the metrics page for Prometheus.
        shared_counters: counters of the whole gateway.
        other_workers: the other processes of the same gateway.
        recent: last requests of this process.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        model: ServedModel,
        connections: Connections,
        other_workers: OtherWorkers | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.model = model
        self.texts = TextWork(held_bytes=text_budget(memory_limit_bytes(), processes=settings.processes))
        self.other_workers = other_workers or SingleWorker()
        self.shared_counters = self.other_workers.shared_counters
        self.meter = RequestMeter(self.shared_counters.tally)
        self.recent = Recent(process=self.shared_counters.row)
        self._records = RequestRecords(
            self.shared_counters, self.meter, access_log=settings.access_log, recent=self.recent, tracer=tracer
        )
        self._running = 0  # in this process
        self._settings = settings
        self._connections = connections
        self.metrics = GatewayMetrics(self.shared_counters, model.name, connections.fleet, self._accepts)
        self._admission_queue = AdmissionQueue(settings, connections, self.shared_counters)
        self._outputs = OutputRunner(
            settings, model, connections, self._admission_queue, self.shared_counters, self.meter
        )
        self._pools = PoolRunner(settings, connections, self.texts, self.meter)
        self._requests: set[RunningRequest] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self.other_workers.join(self)

    @property
    def running(self) -> int:
        """Number of outputs that run or wait now in the whole gateway."""
        return self.shared_counters.total(Count.RUNNING)

    @property
    def worker_loads(self) -> list[WorkerLoad]:
        """How busy each process of the gateway is."""
        return worker_loads(self.shared_counters)

    @property
    def draining(self) -> bool:
        """Whether new requests are refused, because the process is about to end."""
        return self._draining

    @property
    def counters(self) -> Counters:
        return Counters.of(self.shared_counters)

    def check_name(self, name: str, *, hide_names: bool = False) -> AdapterRef | None:
        """The adapter that a client names as its model, in the revision that serves now; None for the base model.

        Raises:
            UnknownModel: neither the model nor an adapter has this name.
        """
        if name in ("", self.model.name):
            return None
        adapters = self._connections.fleet.adapters()
        if name not in adapters:
            self.model.check_name(name, hide_names=hide_names, adapters=sorted(adapters))
        return adapters[name]

    async def generate(
        self,
        message: pb.GenerateRequest,
        write: Write,
        *,
        budget_s: float | None,
        chat: ChatRequest | None = None,
        caller_trace: TraceContext | None = None,
        skip: Skip | None = None,
        answer_id: str = "",
    ) -> None:
        """Serves one request of the current caller (`baton.security.identity`) in the current task.

        `write` gets the messages. The last message of each output has finish_reason, stop_reason and receipt; the very
        last message also has the usage. Cancel the task to cancel the request.

        Args:
            budget_s: time until the client's deadline; None: the client has none.
            chat: used instead of the message's prompt.
            caller_trace: the client's span, which becomes the parent of the request's span.
            skip: gets, in a thread, the messages of a chat that the client already has when it continues a partial
                answer. If given, tokens come with the last of the messages that contain their text.
            answer_id: id that the client gets with the answer, by which `abort` finds the request too.

        Raises:
            BatonError: the reason why the request cannot be finished, with the request's id.
        """
        request_id = check_request_id(message.request_id)
        caller = identity.current()
        record = self._records.begin(request_id, caller.name, caller_trace, answer_id=answer_id)
        is_chat = chat is not None or message.HasField("chat")
        record.note_request(message.model, CHAT if is_chat else COMPLETION)
        with record.until_end():
            self.model.check_generates()
            outputs = check_outputs(message, max_outputs=self._settings.max_concurrent_requests)
            tokens = fewest_tokens(message, chat) if caller.budget.limits.tokens_per_minute else 0
            with caller.budget.request(outputs=outputs.drawn, tokens=tokens) as charge:
                message.cache_salt = caller.salt(message.cache_salt)
                timeout_s = self._timeout_s(budget_s)
                call = RequestCall(message, chat, request_id, record.started_at_s, timeout_s, record.traceparent, skip)
                await self._serve(call, write, outputs, charge, record, has_deadline=budget_s is not None)

    async def pool(
        self, request: PoolingRequest, *, budget_s: float | None, caller_trace: TraceContext | None = None
    ) -> PooledAnswer:
        """Serves one request of the current caller for pooled prompts. Cancel the task to cancel the request.

        Raises:
            BatonError: the reason why the request cannot be finished, with the request's id.
        """
        caller = identity.current()
        request_id = check_request_id(request.request_id)
        record = self._records.begin(request_id, caller.name, caller_trace, answer_id=request.answer_id)
        record.note_request(request.model, request.operation)
        with (
            record.until_end(),
            caller.budget.request(tokens=request.size_bytes // CHARACTERS_PER_TOKEN) as charge,
            self._admitted(record, Outputs(1, 1)) as running,
        ):
            request = replace(request, cache_salt=caller.salt(request.cache_salt))
            adapter = self.check_name(request.model)
            return await self._pools.run(running, request, charge, adapter=adapter, timeout_s=self._timeout_s(budget_s))

    async def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Ends all running requests of the whole gateway with these ids; their callers get `Cancelled`.

        An id is that of a request, which may stand for several, or that of an answer. An authenticated caller ends only
        its own requests, unless it is an operator. Returns the ids whose requests were running.
        """
        wanted = list(dict.fromkeys(request_ids))
        client = identity.current().ends_only
        aborted = self.abort_here(wanted, client) | await self.other_workers.abort(wanted, client)
        return [request_id for request_id in wanted if request_id in aborted]

    def abort_here(self, request_ids: Iterable[str], client: str | None = None) -> set[str]:
        """Ends requests in this process, as `abort` does; only those of `client`, or of all clients if it is None."""
        wanted, aborted = set(request_ids), set()
        for running in self._requests:
            if (found := wanted & running.ids) and client in (None, running.client):
                running.end(Cancelled("the request was aborted"))
                aborted |= found
        return aborted

    async def recent_of_all(self, most: int, client: str | None) -> list[Shown]:
        """The last finished requests of the whole gateway; only those of `client`, or of all clients if it is None."""
        others = await self.other_workers.recent(most, client)
        return newest_of([self.recent.newest(most, client), *others], most)

    def _accepts(self) -> bool:
        return not self._draining and self._connections.fleet.serves()

    async def drain(self, grace_s: float) -> None:
        """Refuses new requests, waits for running ones, and after the grace period ends the rest with an error."""
        self._draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("%d request(s) did not finish within the %.0f s of the drain", self._running, grace_s)
        for running in self._requests:
            running.end(Draining("the gateway is shutting down", cure="send the request again"))

    async def encode(self, text: str, *, add_special_tokens: bool = True, is_request: bool = False) -> list[int]:
        """Tokenizes in a thread, so that a long text delays no other request's tokens.

        Args:
            is_request: whether the client asked only for this, so that it counts as one of its requests.

        Raises:
            InvalidRequest: the text is longer than any prompt.
            Overloaded: too many large texts wait already, or the caller is over a limit.
        """
        limit = self._connections.fleet.max_context_tokens
        work = partial(
            encode, text, self.model, max_context_tokens=limit, field="text", add_special_tokens=add_special_tokens
        )
        with identity.current().budget.request(tokens=len(text) // CHARACTERS_PER_TOKEN, is_new=is_request):
            return await self.texts.run(len(text), work)

    async def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Decodes in a thread. Counts as a request of the client."""
        work = partial(self.model.tokenizer.decode, token_ids, skip_special_tokens=skip_special_tokens)
        with identity.current().budget.request(tokens=len(token_ids)):
            return await self.texts.run(_BYTES_PER_TOKEN * len(token_ids), work)

    # ----

    def _timeout_s(self, budget_s: float | None) -> float:
        limit_s = self._settings.request_timeout_s
        return limit_s if budget_s is None else min(budget_s, limit_s)

    async def _serve(
        self,
        call: RequestCall,
        write: Write,
        outputs: Outputs,
        charge: LimitedPrompt,
        record: RequestRecord,
        *,
        has_deadline: bool,
    ) -> None:
        client = record.client
        if not self._draining:
            deadline_s = call.started_at_s + call.timeout_s if has_deadline else None
            self._admission_queue.check(call.message, outputs, client, deadline_s=deadline_s)
        with self._admitted(record, outputs) as running:
            max_context_tokens = self._connections.fleet.max_context_tokens
            adapter = self.check_name(call.message.model)
            prepared = await prepare(
                call, self.model, self.texts, max_context_tokens=max_context_tokens, adapter=adapter
            )
            record.prepared(prepared.request)
            charge.has(len(prepared.request.prompt))
            for _ in self._connections.fleet.look_ahead(prepared.request):
                await asyncio.sleep(0)
            run = partial(self._outputs.run, running, prepared, call.skip)
            asked = self._admission_queue.ask(prepared.request, outputs, client, has_deadline=has_deadline)
            try:
                try:
                    # A client that continues an answer is not queued: losing its tokens is worse than being late.
                    await running.until(None if prepared.request.output else self._admission_queue.offer(asked))
                finally:
                    self._admission_queue.withdraw(asked)
                record.admitted()
                if outputs.drawn == 1:
                    await run(0, prepared.request, write)
                else:
                    await fan_out(prepared.request, outputs, run, write)
            finally:
                self._admission_queue.settle(asked, running.tokens)

    @contextmanager
    def _admitted(self, record: RequestRecord, outputs: Outputs) -> Iterator[RunningRequest]:
        """Counts each output of the request as running inside the block.

        Raises:
            Draining: the gateway is draining.
            Overloaded: the request may not run.
        """
        if self._draining:
            raise Draining("the gateway is draining", cure="send the request to another gateway", retry_after_s=1.0)
        count, client = outputs.drawn, record.client
        self._admission_queue.enter(client, count)
        running = RunningRequest(record)
        self._requests.add(running)
        self._running += count
        self.shared_counters.add(Count.RUNNING, count)
        self._idle.clear()
        try:
            yield running
        finally:
            self._requests.discard(running)
            self._admission_queue.leave(client, count)
            self._running -= count
            self.shared_counters.add(Count.RUNNING, -count)
            if not self._running:
                self._idle.set()
            record.outputs = count
