"""One HTTP request, as the handlers of all APIs use it: its id, deadline and body, and its answer as a stream of events
or in one piece. Knows no API's shape."""

import asyncio
import hashlib
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from baton.core.errors import BatonError, InvalidRequest
from baton.gateway.fleet.fleet import Fleet
from baton.gateway.http.baton_options import BatonOptions, set_slo
from baton.gateway.http.body_reader import parse_object, read_body
from baton.gateway.http.checking import M, checked
from baton.gateway.http.errors import ErrorShape, HttpRefusal, openai_error
from baton.gateway.http.event_stream import (
    ChatEncoder,
    ClientLeft,
    EventStream,
    HttpJob,
    ResponseEncoder,
    WriteFor,
    unless_left,
)
from baton.gateway.http.field_errors import short
from baton.gateway.http.responses.stored import StoredResponses
from baton.gateway.http.unknown_fields import JsonBody, UnknownFields
from baton.gateway.http.view import View
from baton.gateway.serving.collected import AnswerCollector
from baton.gateway.serving.serving import Serving
from baton.gateway.text.chat.types import ChatRequest
from baton.protos.v1 import generation_pb2 as pb
from baton.security.authenticator import Authenticator
from baton.security.exposure import is_loopback
from baton.settings.config import MIB
from baton.settings.gateway_config import GatewaySettings
from baton.tracing.context import TraceContext, read_context

T = TypeVar("T")

UNREAD_CALLS = (
    "tool calls of this model come out as text, because the format in its chat template is unknown; "
    "set tool_choice to required or to a function, which forces a call that is read"
)

REQUEST_ID = "baton.request_id"  # key in the scope of a request

_SMALL_BODY = 1 << 16  # bytes; parsing a body of this size blocks the event loop for milliseconds at worst
_WARNINGS_MAX = 16  # a client's parser limits the size of an answer's headers
_DEADLINES = ("x-request-timeout-s", "x-baton-deadline-s")

log = logging.getLogger("baton")


@dataclass
class Context:
    """State that the handlers of all requests share.

    Attributes:
        view: the cluster's state for operators.
        authenticator: identifies callers; None: everybody may call everything.
        error_shapes: formats of errors, by the beginning of a path; the default is OpenAI's.
        draining: whether the process is about to end.
        started_s: Unix time of the process's start.
        stored: the responses that the gateway stores.
    """

    settings: GatewaySettings
    serving: Serving
    fleet: Fleet
    view: View
    authenticator: Authenticator | None = None
    error_shapes: dict[str, ErrorShape] = field(default_factory=dict)
    draining: bool = False
    started_s: int = field(default_factory=lambda: int(time.time()))
    stored: StoredResponses = field(init=False)

    def __post_init__(self) -> None:
        self.stored = StoredResponses(self.settings, self.serving.other_workers)

    @property
    def listen_host(self) -> str | None:
        """The host that the server listens on, if only this machine reaches it; else None."""
        host = self.settings.http_listen.rpartition(":")[0]
        return host if is_loopback(host) else None

    def error_shape(self, path: str) -> ErrorShape:
        shapes = (shape for beginning, shape in self.error_shapes.items() if path.startswith(beginning))
        return next(shapes, openai_error)


class HttpCall:
    """One HTTP request.

    Attributes:
        request_id: the client's x-request-id, or a random id; the answer's headers and receipt repeat it.
        answer_id: id of the answer; empty until `new_answer_id`.
        wants_receipt: whether the client asked for the receipt by a header.
        field_names: this API's names of our fields, for errors, where they differ.
        warnings: what `warn` was given so far.

    Raises:
        InvalidRequest: a header has a wrong value.
    """

    def __init__(self, context: Context, request: Request) -> None:
        self.context = context
        self.serving = context.serving
        self.request = request
        self.request_id: str = request.scope[REQUEST_ID]
        self.answer_id = ""
        self.wants_receipt = request.headers.get("x-baton-receipt", "") in ("1", "true")
        self.field_names: dict[str, str] = {}
        self.warnings: list[str] = []
        self._limit_s = _limit_s(request)
        self._ttft_s = _seconds(request, "x-baton-ttft-s")
        self._tpot_s = _seconds(request, "x-baton-tpot-s")
        self._session_id = request.headers.get("x-session-id", "")
        self._loop = asyncio.get_running_loop()
        self._started_at_s = self._loop.time()

    @property
    def budget_s(self) -> float | None:
        """Seconds left of the client's limit; None if the client set none."""
        return None if self._limit_s is None else self._limit_s - (self._loop.time() - self._started_at_s)

    def new_answer_id(self, prefix: str, *, resumable: bool = False) -> str:
        """Gives the answer an id, by which the running request can be ended.

        Clients may send one request id with several requests, but they take an answer's id for unique. So it is random.

        Args:
            resumable: the client gets what it needs to ask another gateway for the rest. The id then follows from the
                request's, so that the rest has the same one.
        """
        if resumable:
            self.answer_id = prefix + hashlib.blake2b(self.request_id.encode(), digest_size=16).hexdigest()
        else:
            self.answer_id = prefix + secrets.token_hex(16)
        return self.answer_id

    def warn(self, text: str) -> None:
        """Adds a header `x-baton-warning` to the answer, for a part of the request that is served without effect."""
        if text not in self.warnings and len(self.warnings) < _WARNINGS_MAX:
            self.warnings.append(text)

    async def read(self, model: type[M]) -> M:
        """Returns the body as a checked model. Raises what `read_as` raises."""
        return await self.read_as(lambda value: checked(model, value))

    async def read_as(self, understand: Callable[[dict[str, Any]], T]) -> T:
        """Reads the body as a JSON object, and returns what `understand` makes of it.

        A large body is parsed in a thread, so that it delays no other request's tokens. Fields that `checked` finds
        unknown are refused, or named in warnings, as the setting `unknown_fields` says.

        Args:
            understand: a pure function, which passes the body as it is to `checked`; may run in a thread.

        Raises:
            InvalidRequest: the body is not a JSON object or is too large, or `understand` refused it.
            Overloaded: too many large bodies are waiting.
            ClientLeft: the client disconnected before the body ended.
        """
        with self.serving.texts.holding() as hold:
            body = await self._read_body(hold)
            unknown = UnknownFields() if self.context.settings.unknown_fields == "warn" else None
            if len(body) <= _SMALL_BODY:
                understood, warnings = _understood(body, understand, unknown)
            else:
                understood, warnings = await self.serving.texts.run(
                    len(body), lambda: _understood(body, understand, unknown)
                )
        if unknown is not None and unknown.count:
            self.serving.meter.unknown_fields(unknown.count)
        for text in warnings:
            self.warn(text)
        return understood

    async def _read_body(self, hold: Callable[[int], None]) -> bytes:
        bytes_max = int(self.context.settings.http_body_mib * MIB)
        chunks = _counted(self.request.stream(), hold)
        try:
            async with asyncio.timeout(self.budget_s):
                return await read_body(chunks, self.request.headers, bytes_max=bytes_max)
        except ClientDisconnect:
            raise ClientLeft from None
        except TimeoutError:
            raise HttpRefusal(
                408, "request_timeout", "the body did not arrive in time", headers={"connection": "close"}
            ) from None

    async def collect(self, message: pb.GenerateRequest, chat: ChatRequest | None = None) -> pb.CompleteResponse:
        """Returns the whole outputs of a request. Cancels the request if the client leaves.

        Raises:
            BatonError: the request failed.
            ClientLeft: the client closed its connection.
        """
        (whole,) = await self.collect_all([message], chat)
        return whole

    async def collect_all(
        self, messages: Sequence[pb.GenerateRequest], chat: ChatRequest | None = None
    ) -> list[pb.CompleteResponse]:
        """Returns the whole outputs of several requests that run at the same time. Raises what `collect` raises."""
        collectors = [AnswerCollector() for _ in messages]
        jobs = [HttpJob(message, collector.push, chat) for message, collector in zip(messages, collectors, strict=True)]
        await self.serve(jobs)
        return [collector.response() for collector in collectors]

    async def serve(self, jobs: Sequence[HttpJob]) -> None:
        """Runs jobs whose `push` collect an answer in one piece. Raises what `collect` raises."""
        self._warn_of_unread_calls(jobs)
        generation = asyncio.create_task(self.generate(jobs, _ignore))
        await unless_left(generation, self.request.receive)

    def stream(
        self,
        message: pb.GenerateRequest,
        encoder: ChatEncoder,
        chat: ChatRequest,
        *,
        as_events: type[BatonError] | tuple[()] = (),
    ) -> Response:
        """Returns the answer to a chat as server-sent events. `as_events`: see `EventStream`."""
        job = HttpJob(message, encoder.push, chat, encoder.skip)
        return self.stream_all([job], encoder, as_events=as_events)

    def stream_all(
        self,
        jobs: Sequence[HttpJob],
        encoder: ResponseEncoder,
        *,
        as_events: type[BatonError] | tuple[()] = (),
    ) -> Response:
        """Streams the answers of several requests that run at the same time; `encoder` ends the stream.

        Raises:
            InvalidRequest: a chat names a template that does not exist.
        """
        self._warn_of_unread_calls(jobs)
        shape = self.context.error_shape(self.request.scope["path"])
        generate = partial(self.generate, jobs)
        return EventStream(self.request_id, generate, encoder, self.in_own_words, shape, as_events)

    def _warn_of_unread_calls(self, jobs: Sequence[HttpJob]) -> None:
        chat = self.serving.model.chat
        if any(job.chat is not None and chat.leaves_calls_unread(job.chat) for job in jobs):
            self.warn(UNREAD_CALLS)

    async def generate(self, jobs: Sequence[HttpJob], write: WriteFor) -> None:
        """Runs the jobs at the same time. The first error ends all of them.

        Raises:
            BatonError: a request failed.
        """
        for job in jobs:
            self._add_headers(job.message)
        serve = partial(
            self.serving.generate,
            budget_s=self.budget_s,
            caller_trace=self.caller_trace(),
            answer_id=self.answer_id,
        )
        runs = [serve(job.message, write(job), chat=job.chat, skip=job.skip) for job in jobs]
        if len(runs) == 1:
            await runs[0]
            return
        try:
            async with asyncio.TaskGroup() as group:
                for run in runs:
                    group.create_task(run)
        except* BatonError as errors:
            first = errors.exceptions[0]
        else:
            return
        assert isinstance(first, BatonError)
        raise first

    def caller_trace(self) -> TraceContext | None:
        headers = self.request.headers
        given = headers.getlist("traceparent")
        return read_context(given[0], ",".join(headers.getlist("tracestate"))) if len(given) == 1 else None

    def _add_headers(self, message: pb.GenerateRequest) -> None:
        """Copies to the message what headers set and the body does not."""
        set_slo(message.slo, ttft_s=self._ttft_s, tpot_s=self._tpot_s)
        message.session_id = message.session_id or self._session_id

    def in_own_words(self, error: BatonError) -> BatonError:
        """Replaces the field's name in the error by this API's name."""
        name = error.field.removeprefix("sampling.")
        error.field = self.field_names.get(name, f"baton.{name}" if name in BatonOptions.model_fields else name)
        return error


def _understood(
    body: bytes, understand: Callable[[dict[str, Any]], T], unknown: UnknownFields | None
) -> tuple[T, list[str]]:
    """Returns what `understand` makes of a body, and warnings about the body's unknown fields."""
    value = JsonBody(parse_object(body), unknown)
    understood = understand(value)
    return understood, [] if unknown is None or not unknown.count else unknown.warnings(value)


async def _counted(chunks: AsyncIterator[bytes], hold: Callable[[int], None]) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        hold(len(chunk))
        yield chunk


def _ignore(job: HttpJob) -> Callable[[pb.GenerateResponse], Awaitable[None]]:
    async def write(message: pb.GenerateResponse) -> None:
        if not message.notice:
            job.push(message)

    return write


def _limit_s(request: Request) -> float | None:
    for name in _DEADLINES:
        given = request.headers.get(name)
        if given is not None:
            return _positive(name, given, "seconds")
    return None


def _seconds(request: Request, name: str) -> float | None:
    given = request.headers.get(name)
    return None if given is None else _positive(name, given, "seconds")


def _positive(name: str, given: str, unit: str) -> float:
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise InvalidRequest(f"{name} is {short(given)}", field=name, value=short(given), allowed=(f"{unit} above 0",))
    return value
