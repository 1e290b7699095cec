"""Resumes a request at another gateway: what to send there, and which part of its answer the client still lacks. Pure.

An output's tokens, text and chat deltas depend on the request and its seed, not on how they were cut into messages. So
the resumed request carries the tokens up to the last message but one, and the client drops from the new answer as much
as it received after those tokens. The last message's tokens are computed again, because an end may have followed them
that never arrived.
"""

import secrets
import uuid
from copy import deepcopy
from dataclasses import dataclass, field

from baton.core.errors import NoNode
from baton.protos.v1 import generation_pb2 as pb


def prepare(request: pb.GenerateRequest, *, resumes: bool) -> None:
    """Sets the request's id, on which ids of tool calls depend, and its seed; a gateway would otherwise draw both.

    Args:
        resumes: the answer may continue at another gateway, which must then draw the same tokens.
    """
    if not request.request_id:
        request.request_id = f"req-{uuid.uuid4().hex}"
    if resumes and not request.sampling.HasField("seed"):
        request.sampling.seed = secrets.randbits(64)


@dataclass
class _Amount:
    """Counts the tokens and characters of a piece of one output.

    Attributes:
        call_ids: indices of tool calls whose id and name arrived.
        arguments: characters of the calls' arguments, by index.
    """

    tokens: int = 0
    text: int = 0
    content: int = 0
    reasoning: int = 0
    call_ids: set[int] = field(default_factory=set)
    arguments: dict[int, int] = field(default_factory=dict)
    prompt_logprobs: bool = False

    def add(self, message: pb.GenerateResponse) -> None:
        self.tokens += len(message.tokens)
        self.text += len(message.text)
        self.content += len(message.chat.content)
        self.reasoning += len(message.chat.reasoning)
        for call in message.chat.tool_calls:
            self.call_ids.add(call.index)
            self.arguments[call.index] = self.arguments.get(call.index, 0) + len(call.arguments)
        self.prompt_logprobs |= bool(message.prompt_logprobs)

    @property
    def some_left(self) -> bool:
        counts = (self.tokens, self.text, self.content, self.reasoning, *self.arguments.values())
        return any(counts)

    def drop_from(self, message: pb.GenerateResponse) -> None:
        """Removes from the message what the client already has, and lowers the counts by it."""
        tokens = min(self.tokens, len(message.tokens))
        del message.tokens[:tokens]
        self.tokens -= tokens
        message.text, self.text = _without(message.text, self.text)
        if message.HasField("chat"):
            self._drop_from_chat(message.chat)
        if self.prompt_logprobs:
            del message.prompt_logprobs[:]

    def _drop_from_chat(self, chat: pb.ChatDelta) -> None:
        chat.content, self.content = _without(chat.content, self.content)
        chat.reasoning, self.reasoning = _without(chat.reasoning, self.reasoning)
        left = []
        for call in chat.tool_calls:
            call.arguments, self.arguments[call.index] = _without(call.arguments, self.arguments.get(call.index, 0))
            if call.index in self.call_ids:
                call.ClearField("id")
                call.ClearField("name")
            if call.id or call.name or call.arguments:
                left.append(call)
        del chat.tool_calls[:]
        chat.tool_calls.extend(left)


def _without(text: str, characters: int) -> tuple[str, int]:
    """Returns the text without its first characters, and how many characters remain to be dropped."""
    dropped = min(characters, len(text))
    return text[dropped:], characters - dropped


@dataclass
class _Output:
    """The part of one output that the client has.

    Attributes:
        base: tokens with which a resumed request begins.
        last: tokens that arrived after `base`.
        since: how much arrived after `base`.
        dropping: how much of that the resumed answer still repeats.
        finished: whether the output's last message arrived.
        revision: of the weights that computed the output; empty until it is known.
    """

    base: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    since: _Amount = field(default_factory=_Amount)
    dropping: _Amount = field(default_factory=_Amount)
    finished: bool = False
    revision: str = ""


class AnswerProgress:
    """Tracks the answer of one request, so that another gateway can continue it."""

    def __init__(self, request: pb.GenerateRequest) -> None:
        self._request = request
        self._one = max(request.n, request.best_of) <= 1
        self._outputs: dict[int, _Output] = {}

    def request(self) -> pb.GenerateRequest:
        """Returns the request for the next gateway: for the rest of a single output, or for several from the start."""
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        for output in self._outputs.values():
            output.dropping = deepcopy(output.since)
        if self._one and 0 in self._outputs:
            request.output_token_ids.extend(self._outputs[0].base)
        revisions = {output.revision for output in self._outputs.values()}
        if len(revisions) == 1:
            request.revision = revisions.pop()
        return request

    def take(self, message: pb.GenerateResponse) -> pb.GenerateResponse | None:
        """Returns the part of a message that the client does not have yet; None if it has all of it.

        Raises:
            NoNode: the message was computed with other weights than the answer so far.
        """
        if message.notice:
            return message
        output = self._outputs.setdefault(message.index, _Output())
        if output.finished:
            return None
        if message.revision and message.revision != (output.revision or message.revision):
            what = f"the answer began with revision {output.revision} of the weights, and would continue with"
            cure = "send the request again from its beginning"
            raise NoNode(f"{what} {message.revision}", field="revision", value=message.revision, cure=cure)
        output.revision = message.revision or output.revision
        repeats = output.dropping.some_left
        output.dropping.drop_from(message)
        if message.finish_reason:
            output.finished = True
            return message
        if not _has_news(message):
            return None
        if message.tokens and self._one:
            if not repeats:
                output.base += output.last
                output.last = []
                output.since = _Amount(prompt_logprobs=output.since.prompt_logprobs)
            output.last += [token.token_id for token in message.tokens]
        output.since.add(message)
        return message


def _has_news(message: pb.GenerateResponse) -> bool:
    chat = message.chat
    return bool(message.tokens or message.text or message.prompt_logprobs) or bool(
        chat.content or chat.reasoning or chat.tool_calls
    )
