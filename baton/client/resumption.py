"""How a client's request goes on at another gateway: what to ask of it, and what to pass on of its answer. Pure.

An output's tokens, text and chat deltas depend on the request and its seed, not on how they were cut into messages. So
a request is sent again with the tokens up to the last message but one, and as much of the new answer is dropped as came
after them. The last message's own tokens are computed again: they may be followed by an end that never arrived.
"""

import secrets
import uuid
from copy import deepcopy
from dataclasses import dataclass, field

from baton.core.errors import NoNode
from baton.protos.v1 import generation_pb2 as pb


def prepare(request: pb.GenerateRequest, *, resumes: bool) -> None:
    """Gives the request what a gateway would draw for it: an id, from which follow those of tool calls, and a seed.

    Args:
        resumes: the answer may go on at another gateway, which must draw the same tokens.
    """
    if not request.request_id:
        request.request_id = f"req-{uuid.uuid4().hex}"
    if resumes and not request.sampling.HasField("seed"):
        request.sampling.seed = secrets.randbits(64)


@dataclass
class _Given:
    """How much of one output came after the tokens that a resumed request begins with, or is still to be dropped.

    Attributes:
        call_ids: indices of tool calls whose id and name came.
        arguments: characters of their arguments, by index.
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
        """Removes from the message what the client has, and counts it."""
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
    """The text without its first characters, and how many more are to be dropped from the next one."""
    dropped = min(characters, len(text))
    return text[dropped:], characters - dropped


@dataclass
class _Output:
    """One output as far as the client has it.

    Attributes:
        base: tokens with which a resumed request begins.
        last: tokens that came after `base`.
        since: what came after `base`.
        dropping: what a resumed answer repeats of it.
        finished: its last message came.
        revision: of the weights that it comes from; empty: not known.
    """

    base: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    since: _Given = field(default_factory=_Given)
    dropping: _Given = field(default_factory=_Given)
    finished: bool = False
    revision: str = ""


class AnswerProgress:
    """One request, its answer so far, and its continuation at other gateways."""

    def __init__(self, request: pb.GenerateRequest) -> None:
        self._request = request
        self._one = max(request.n, request.best_of) <= 1
        self._outputs: dict[int, _Output] = {}

    def request(self) -> pb.GenerateRequest:
        """What to ask of the next gateway: the rest of the one output; several are drawn again from the beginning."""
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
        """What the client has not had of the gateway's next message; None: nothing.

        Raises:
            NoNode: it comes from other weights than what the client has.
        """
        if message.notice:
            return message
        output = self._outputs.setdefault(message.index, _Output())
        if output.finished:
            return None
        if message.revision and message.revision != (output.revision or message.revision):
            what = f"the answer began with revision {output.revision} of the weights, and goes on with another one"
            cure = "send the request again from its beginning"
            raise NoNode(f"{what}, {message.revision}", field="revision", value=message.revision, cure=cure)
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
                output.since = _Given(prompt_logprobs=output.since.prompt_logprobs)
            output.last += [token.token_id for token in message.tokens]
        output.since.add(message)
        return message


def _has_news(message: pb.GenerateResponse) -> bool:
    chat = message.chat
    return bool(message.tokens or message.text or message.prompt_logprobs) or bool(
        chat.content or chat.reasoning or chat.tool_calls
    )
