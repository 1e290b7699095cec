"""Runs one output of a prepared request to its last message, as text or as the parts of a chat."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from baton.core.errors import BatonError, DeadlineExceeded
from baton.core.types import Path
from baton.gateway.core.request import Request, Rules
from baton.gateway.core.shared_counters import Count, SharedCounters
from baton.gateway.observe.meter import RequestMeter
from baton.gateway.observe.request_record import RequestRecord
from baton.gateway.request.connections import Connections
from baton.gateway.request.driver import RequestDriver, Write
from baton.gateway.request.journal import Journal
from baton.gateway.request.machine import RequestMachine
from baton.gateway.request.write_scheduler import WriteScheduler
from baton.gateway.serving.admission_queue import AdmissionQueue
from baton.gateway.serving.preparation import Prepared
from baton.gateway.text.chat.types import OutputParser, ParsedDelta
from baton.gateway.text.model import ServedModel
from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb
from baton.security import identity
from baton.settings.gateway_config import GatewaySettings

Skip = Callable[[pb.GenerateResponse], object]


class RunningRequest:
    """One client's request, from its admission to its end.

    Attributes:
        ids: ids by which it can be ended.
    """

    def __init__(self, record: RequestRecord) -> None:
        self.record = record
        self.ids = {record.request_id, record.answer_id} - {""}
        self.client = record.client
        self.drivers: set[RequestDriver] = set()
        self.tokens = 0  # tokens of the outputs that have ended
        self.ended_by: BatonError | None = None
        self._admission: asyncio.Future[None] | None = None  # set while the request waits in the admission queue

    def end(self, error: BatonError) -> None:
        """Ends all outputs of the request with this error, including those that have not begun."""
        self.ended_by = self.ended_by or error
        if self._admission is not None and not self._admission.done():
            self._admission.set_exception(self.ended_by)
        for driver in self.drivers:
            driver.end(self.ended_by)

    async def until(self, admission: "asyncio.Future[None] | None") -> None:
        """Waits until the request is admitted; None means that it is admitted already.

        Raises:
            BatonError: the request may not run, or was ended.
        """
        if self.ended_by is not None:
            raise self.ended_by
        if admission is not None:
            self._admission = admission
            await admission
            self._admission = None


class OutputRunner:
    """Runs the outputs of one process's requests."""

    def __init__(
        self,
        settings: GatewaySettings,
        model: ServedModel,
        connections: Connections,
        queue: AdmissionQueue,
        counters: SharedCounters,
        meter: RequestMeter,
    ) -> None:
        self._model, self._connections, self._queue = model, connections, queue
        self._counters, self._meter, self._scheduler = counters, meter, WriteScheduler()
        self._rules = Rules(
            local_policy=settings.local_policy,
            max_attempts=settings.max_attempts,
            max_queue_s=settings.max_queue_s,
            prefill_stall_s=settings.prefill_stall_s,
            decode_stall_s=settings.decode_stall_s,
            failover_wait_s=settings.failover_wait_s,
            slo=settings.slo,
            objective=settings.objective,
            refuse_late=settings.refuse_late,
        )

    async def run(
        self, running: RunningRequest, prepared: Prepared, skip: Skip | None, index: int, request: Request, write: Write
    ) -> None:
        """Serves one output in the current task."""
        if running.ended_by is not None:
            raise running.ended_by
        hides_special = request.sampling.skip_special_tokens
        detokenizer = self._model.tokenizer.detokenizer(request.prompt, skip_special_tokens=hides_special)
        machine = RequestMachine(request, self._rules, self._connections.fleet, detokenizer, self._meter)
        chat: ChatOutput | None = None
        if prepared.parser is not None:
            parser = prepared.parser(f"{request.request_id}/{index}")
            chat = ChatOutput(parser, stops=request.sampling.stop, tokens_last=skip is not None)
            write = partial(_write_chat, chat, write)
        if request.output:
            await asyncio.to_thread(_resume, machine, request.output, chat, skip)
            if running.ended_by is not None:
                raise running.ended_by
        output = self._queue.begins(machine)
        journal = Journal(index)
        write = partial(output.write, write)
        driver = RequestDriver(
            request,
            machine,
            self._connections,
            self._queue.waiting_for_nodes,
            self._scheduler,
            write,
            journal,
            self._meter.merged,
        )
        running.drivers.add(driver)
        completed, in_time = False, True
        try:
            await driver.run()
            completed = True
        except DeadlineExceeded:
            in_time = False
            raise
        finally:
            running.drivers.discard(driver)
            identity.current().budget.spend(machine.new_tokens)
            running.tokens += machine.new_tokens
            self._queue.ran(output, whole=completed, in_time=in_time)
            running.record.output_ended(machine, journal)
        # A split prompt counts as remote.
        self._counters.add(Count.LOCAL if machine.path is Path.LOCAL else Count.REMOTE, 1)


class ChatOutput:
    """Fills in `chat` in the messages of one output.

    Within a message, reasoning comes before the answer and the answer before tool calls. If the model writes them in
    another order, further messages with only `chat` follow.

    Args:
        stops: the output's stop strings.
        tokens_last: whether the last of these messages has the tokens instead of the first one, so that a client that
            has received tokens has also received all of their content.

    Attributes:
        reasoning_tokens: tokens of reasoning so far. A message's tokens count for the last part that it adds to.
    """

    def __init__(self, parser: OutputParser, *, stops: Sequence[str] = (), tokens_last: bool = False) -> None:
        self._parser = parser
        self._stops = stops
        self._tokens_last = tokens_last
        self.reasoning_tokens = 0
        self._pending_tokens = 0  # tokens whose text has not arrived yet

    def messages(self, message: pb.GenerateResponse) -> list[pb.GenerateResponse]:
        """Splits a message into the messages for the client. The last one has the output's end."""
        deltas = self._parser.push(message.text) if message.text else []
        if message.finish_reason:
            cut = message.finish_reason == common_pb2.FINISH_REASON_LENGTH
            deltas = [*deltas, *self._parser.finish(cut=cut, stopped=message.stop_reason in self._stops)]
        self._count(len(message.tokens), deltas)
        if message.HasField("usage"):
            message.usage.reasoning_tokens = self.reasoning_tokens
        if not deltas:
            return [message]
        if len(deltas) == 1 and not (deltas[0].reasoning or deltas[0].tool_calls):  # nearly every message
            message.chat.content = deltas[0].content
            return [message]
        parts = [pb.ChatDelta()]
        for delta in deltas:
            if not _follows(parts[-1], delta):
                parts.append(pb.ChatDelta())
            _append(parts[-1], delta)
        if len(parts) == 1:
            message.chat.CopyFrom(parts[0])
            return [message]
        return _spread(message, parts, tokens_last=self._tokens_last)

    def _count(self, tokens: int, deltas: Sequence[ParsedDelta]) -> None:
        self._pending_tokens += tokens
        if deltas:
            last = deltas[-1]
            if last.reasoning and not (last.content or last.tool_calls):
                self.reasoning_tokens += self._pending_tokens
            self._pending_tokens = 0


def _follows(part: pb.ChatDelta, delta: ParsedDelta) -> bool:
    """Whether the delta may join the part without changing the order of reasoning, answer and tool calls."""
    after_reasoning = bool(part.content or part.tool_calls)
    after_content = bool(part.tool_calls)
    return not (delta.reasoning and after_reasoning) and not (delta.content and after_content)


def _append(part: pb.ChatDelta, delta: ParsedDelta) -> None:
    if delta.content:
        part.content += delta.content
    if delta.reasoning:
        part.reasoning += delta.reasoning
    for call in delta.tool_calls:
        last = part.tool_calls[-1] if part.tool_calls else None
        if last is not None and last.index == call.index and not call.id and not call.name:
            last.arguments += call.arguments
        else:
            part.tool_calls.add(index=call.index, id=call.id, name=call.name, arguments=call.arguments)


def _spread(message: pb.GenerateResponse, parts: list[pb.ChatDelta], *, tokens_last: bool) -> list[pb.GenerateResponse]:
    """Makes one message of each part. The first one has the text, the last one the output's end."""
    messages = [pb.GenerateResponse(index=message.index, chat=part) for part in parts]
    first, last = messages[0], messages[-1]
    first.text, first.request_id, first.revision = message.text, message.request_id, message.revision
    if message.HasField("prompt_usage"):
        first.prompt_usage.CopyFrom(message.prompt_usage)
    (last if tokens_last else first).tokens.extend(message.tokens)
    first.prompt_logprobs.extend(message.prompt_logprobs)
    last.finish_reason, last.stop_reason = message.finish_reason, message.stop_reason
    if message.HasField("usage"):
        last.usage.CopyFrom(message.usage)
    if message.HasField("receipt"):
        last.receipt.CopyFrom(message.receipt)
    return messages


def _resume(machine: RequestMachine, token_ids: Sequence[int], chat: ChatOutput | None, skip: Skip | None) -> None:
    """Continues after the tokens that the client already has; `skip` gets their messages."""
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
