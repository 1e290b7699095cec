"""Requests from admission to their last message, for every API that admits them.

Owns what all requests share: their admission, the counters, and the drain at the end of the process.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from traceback import clear_frames
from typing import Protocol

from baton.core.errors import BatonError, Cancelled, DeadlineExceeded, Draining
from baton.core.memory import memory_limit_bytes
from baton.core.types import AdapterRef, Path
from baton.gateway.core.request import Outputs, Request, Rules
from baton.gateway.core.shared_counters import REFUSALS, Count, SharedCounters
from baton.gateway.observe.meter import RequestMeter
from baton.gateway.observe.metrics import GatewayMetrics
from baton.gateway.observe.recent import Recent, Shown, newest_of
from baton.gateway.observe.request_record import RequestRecord, RequestRecords
from baton.gateway.observe.tracing.tracer import Tracer
from baton.gateway.request.connections import Connections
from baton.gateway.request.driver import RequestDriver, Write
from baton.gateway.request.journal import Journal
from baton.gateway.request.machine import RequestMachine
from baton.gateway.request.write_scheduler import WriteScheduler
from baton.gateway.serving.admission_queue import AdmissionQueue
from baton.gateway.serving.chat_output import ChatOutput
from baton.gateway.serving.fan_out import fan_out
from baton.gateway.serving.preparation import (
    CHARACTERS_PER_TOKEN,
    Prepared,
    RequestCall,
    encode,
    fewest_tokens,
    prepare,
)
from baton.gateway.serving.validate import check_outputs, check_request_id
from baton.gateway.text.chat.types import ChatRequest
from baton.gateway.text.model import ServedModel
from baton.gateway.text.text_work import TextWork, text_budget
from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb
from baton.security import identity
from baton.security.limits import LimitedPrompt
from baton.settings.gateway_config import GatewaySettings
from baton.tracing.context import TraceContext

log = logging.getLogger("baton")

Skip = Callable[[pb.GenerateResponse], object]

_BYTES_PER_TOKEN = 8  # of texts that are made of tokens, with their ids


@dataclass(frozen=True)
class Counters:
    """Since the start of the gateway, each output as a request.

    Attributes:
        failed: by the cluster's fault, or at their deadline.
        refused: requests that never ran, by reason.
    """

    finished: int
    failed: int
    remote: int
    local: int
    refused: Mapping[str, int]


class Colleagues(Protocol):
    """The processes that serve as one gateway; this one is among them."""

    @property
    def board(self) -> SharedCounters: ...

    def join(self, serving: "Serving") -> None:
        """From now on, the others' questions reach it."""
        ...

    async def abort(self, request_ids: Sequence[str], client: str | None) -> set[str]:
        """Ends those of these requests that run on other workers; returns their ids. `client`: as in `abort_here`."""
        ...

    async def recent(self, most: int, client: str | None) -> list[list[Shown]]:
        """What `Serving.recent.newest` has on each of the other workers."""
        ...


class Alone:
    """A gateway of one process."""

    def __init__(self) -> None:
        self.board = SharedCounters()

    def join(self, serving: "Serving") -> None:
        pass

    async def abort(self, request_ids: Sequence[str], client: str | None) -> set[str]:  # noqa: ARG002
        return set()

    async def recent(self, most: int, client: str | None) -> list[list[Shown]]:  # noqa: ARG002
        return []


class _Running:
    """One client's request, from its admission to its end."""

    def __init__(self, record: RequestRecord) -> None:
        self.record = record
        self.request_id = record.request_id
        self.client = record.client
        self.drivers: set[RequestDriver] = set()
        self.tokens = 0  # of the outputs that have ended
        self.ended_by: BatonError | None = None
        self._turn: asyncio.Future[None] | None = None  # while it waits for its turn

    def end(self, error: BatonError) -> None:
        """Ends all its outputs with this error, also those that have not begun."""
        self.ended_by = self.ended_by or error
        if self._turn is not None and not self._turn.done():
            self._turn.set_exception(self.ended_by)
        for driver in self.drivers:
            driver.end(self.ended_by)

    async def until(self, turn: "asyncio.Future[None] | None") -> None:
        """Waits for the request's turn; None: it has come.

        Raises:
            BatonError: the request may not run, or was ended.
        """
        if self.ended_by is not None:
            raise self.ended_by
        if turn is not None:
            self._turn = turn
            await turn
            self._turn = None


class Serving:
    """Serves requests until `drain`.

    Args:
        colleagues: further processes of the same gateway; counters and limits are those of all.
        tracer: of requests; None: they are not traced.

    Attributes:
        meter: counts what happens to requests.
        metrics: shows it to Prometheus.
        board: counts of the whole gateway.
        recent: the last requests of this process.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        model: ServedModel,
        connections: Connections,
        colleagues: Colleagues | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.model = model
        self.texts = TextWork(held_bytes=text_budget(memory_limit_bytes(), processes=settings.workers))
        self._colleagues = colleagues or Alone()
        self.board = self._colleagues.board
        self.meter = RequestMeter(self.board.tally)
        self.recent = Recent(process=self.board.own)
        self._records = RequestRecords(
            self.board, self.meter, access_log=settings.access_log, recent=self.recent, tracer=tracer
        )
        self._running = 0  # here
        self._settings = settings
        self._rules = Rules(
            local_policy=settings.local_policy,
            max_attempts=settings.max_attempts,
            queue_s=settings.max_queue_s,
            prefill_stall_s=settings.prefill_stall_s,
            decode_stall_s=settings.decode_stall_s,
            failover_wait_s=settings.failover_wait_s,
            slo=settings.slo,
            refuse_late=settings.refuse_late,
        )
        self._connections = connections
        self.metrics = GatewayMetrics(self.board, model.name, connections.fleet, self._accepts)
        self._turns = WriteScheduler()
        self._waiting_room = AdmissionQueue(settings, connections, self.board)
        self._requests: set[_Running] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._colleagues.join(self)

    @property
    def running(self) -> int:
        """Outputs of requests that run now in the whole gateway."""
        return self.board.total(Count.RUNNING)

    @property
    def draining(self) -> bool:
        """Whether new requests are refused, because the process is about to end."""
        return self._draining

    @property
    def counters(self) -> Counters:
        total = self.board.total
        return Counters(
            total(Count.FINISHED),
            total(Count.FAILED),
            total(Count.REMOTE),
            total(Count.LOCAL),
            refused={name: total(count) for name, count in REFUSALS.items()},
        )

    def check_name(self, name: str, *, to_stranger: bool = False) -> AdapterRef | None:
        """The adapter that a client names as its model, of the revision that serves now; None: the base model.

        Raises:
            UnknownModel: neither has this name.
        """
        if name in ("", self.model.name):
            return None
        adapters = self._connections.fleet.adapters()
        if name not in adapters:
            self.model.check_name(name, to_stranger=to_stranger, adapters=sorted(adapters))
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
    ) -> None:
        """Serves one request of the current caller (`baton.security.identity`) in the current task; `write` gets its
        messages. Cancel the task to cancel the request.

        The last message of each output has finish_reason, stop_reason and receipt, the very last one also usage.

        Args:
            budget_s: time until the client's deadline.
            chat: takes the place of the message's prompt.
            caller_trace: the client's span, of which the request is part.
            skip: gets, in a thread, the messages of a chat that the client has already, where it goes on after a part
                of the answer. With it, tokens come with the last message that has anything of their text.

        Raises:
            BatonError: why it cannot be finished. It has the request's id.
        """
        request_id = check_request_id(message.request_id)
        caller = identity.current()
        record = self._records.begin(request_id, caller.name, caller_trace)
        record.asked(message.model, is_chat=chat is not None or message.HasField("chat"))
        try:
            outputs = check_outputs(message, max_outputs=self._settings.max_concurrent_requests)
            tokens = fewest_tokens(message, chat) if caller.budget.limits.tokens_per_minute else 0
            with caller.budget.request(outputs=outputs.drawn, tokens=tokens) as charge:
                message.cache_salt = caller.salt(message.cache_salt)
                timeout_s = self._timeout_s(budget_s)
                call = RequestCall(message, chat, request_id, record.started_at_s, timeout_s, record.traceparent, skip)
                await self._serve(call, write, outputs, charge, record, has_deadline=budget_s is not None)
        except BatonError as error:
            error.request_id = request_id
            record.failed(error)
            clear_frames(error.__traceback__)  # they refer to the error, and the request would stay as a cycle
            raise
        except asyncio.CancelledError as error:
            record.cancelled()
            clear_frames(error.__traceback__)
            raise
        except Exception as error:
            record.broken(error)
            raise
        record.finished()

    async def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Ends running requests of the whole gateway; their callers get `Cancelled`. Several may have the same id. A
        caller that has shown who it is ends only its own, unless it is an operator.

        Returns:
            the ids that ran.
        """
        wanted = list(dict.fromkeys(request_ids))
        client = identity.current().ends_only
        aborted = self.abort_here(wanted, client) | await self._colleagues.abort(wanted, client)
        return [request_id for request_id in wanted if request_id in aborted]

    def abort_here(self, request_ids: Iterable[str], client: str | None = None) -> set[str]:
        """As `abort`, in this process; only requests of this client, None: of all."""
        wanted, aborted = set(request_ids), set()
        for running in self._requests:
            if running.request_id in wanted and client in (None, running.client):
                running.end(Cancelled("the request was aborted"))
                aborted.add(running.request_id)
        return aborted

    async def recent_of_all(self, most: int, client: str | None) -> list[Shown]:
        """The newest requests of the whole gateway that have ended; only those of this client, None: of all."""
        others = await self._colleagues.recent(most, client)
        return newest_of([self.recent.newest(most, client), *others], most)

    def _accepts(self) -> bool:
        return not self._draining and self._connections.fleet.serves()

    async def drain(self, grace_s: float) -> None:
        """Refuses new requests, waits for those that run, and ends what is left with an error."""
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
            is_request: the client asked for no more than that, so it counts as one of its requests.

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
            self._waiting_room.check(call.message, outputs, client, deadline_s=deadline_s)
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
            run = partial(self._run, running, prepared, call.skip)
            asked = self._waiting_room.ask(prepared.request, outputs, client, has_deadline=has_deadline)
            try:
                try:
                    # A client that lost its gateway goes on at once: to lose tokens is worse than to be late.
                    await running.until(None if prepared.request.output else self._waiting_room.offer(asked))
                finally:
                    self._waiting_room.withdraw(asked)
                record.admitted()
                if outputs.drawn == 1:
                    await run(0, prepared.request, write)
                else:
                    await fan_out(prepared.request, outputs, run, write)
            finally:
                self._waiting_room.settle(asked, running.tokens)

    async def _run(
        self, running: _Running, prepared: Prepared, skip: Skip | None, index: int, request: Request, write: Write
    ) -> None:
        """Serves one output in the current task."""
        if running.ended_by is not None:
            raise running.ended_by
        hides_special = request.sampling.skip_special_tokens
        detokenizer = self.model.tokenizer.detokenizer(request.prompt, skip_special_tokens=hides_special)
        machine = RequestMachine(request, self._rules, self._connections.fleet, detokenizer, self.meter)
        chat: ChatOutput | None = None
        if prepared.parser is not None:
            chat = ChatOutput(prepared.parser(f"{request.request_id}/{index}"), tokens_last=skip is not None)
            write = partial(_write_chat, chat, write)
        if request.output:
            await asyncio.to_thread(_resume, machine, request.output, chat, skip)
            if running.ended_by is not None:
                raise running.ended_by
        output = self._waiting_room.begins(machine)
        journal = Journal(index)
        driver = RequestDriver(request, machine, self._connections, self._turns, partial(output.write, write), journal)
        running.drivers.add(driver)
        whole, in_time = False, True
        try:
            await driver.run()
            whole = True
        except DeadlineExceeded:
            in_time = False
            raise
        finally:
            running.drivers.discard(driver)
            identity.current().budget.spend(machine.new_tokens)
            running.tokens += machine.new_tokens
            self._waiting_room.ran(output, whole=whole, in_time=in_time)
            running.record.output_ended(machine, journal)
        # The first part of a split prompt is remote.
        self.board.add(Count.LOCAL if machine.path is Path.LOCAL else Count.REMOTE, 1)

    @contextmanager
    def _admitted(self, record: RequestRecord, outputs: Outputs) -> Iterator[_Running]:
        """Counts a running request, each of its outputs as one.

        Raises:
            Draining, Overloaded: it may not run.
        """
        if self._draining:
            raise Draining("the gateway is draining", cure="send the request to another gateway", retry_after_s=1.0)
        count, client = outputs.drawn, record.client
        self._waiting_room.enter(client, count)
        running = _Running(record)
        self._requests.add(running)
        self._running += count
        self.board.add(Count.RUNNING, count)
        self._idle.clear()
        try:
            yield running
        finally:
            self._requests.discard(running)
            self._waiting_room.leave(client, count)
            self._running -= count
            self.board.add(Count.RUNNING, -count)
            if not self._running:
                self._idle.set()
            record.outputs = count


def _resume(machine: RequestMachine, token_ids: Sequence[int], chat: ChatOutput | None, skip: Skip | None) -> None:
    """Goes on after the tokens that the client has; `skip` gets their messages."""
    texts = machine.resume()
    if chat is None:
        return
    texts += [""] * (len(token_ids) - len(texts))
    for token_id, text in zip(token_ids, texts, strict=True):
        tokens = [common_pb2.Token(token_id=token_id)]
        for each in chat.messages(pb.GenerateResponse(text=text, tokens=tokens)):
            if skip is not None:
                skip(each)


async def _write_chat(output: ChatOutput, write: Write, message: pb.GenerateResponse) -> None:
    for each in output.messages(message):
        await write(each)
