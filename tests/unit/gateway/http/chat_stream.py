"""Messages of `Serving.generate` for a chat, and the events of a stream, for tests."""

import json
from dataclasses import dataclass
from typing import Any

from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb

USAGE = common_pb2.Usage(prompt_tokens=20, completion_tokens=7, cached_tokens=16)


def chat_message(
    content: str = "", *, reasoning: str = "", tools: tuple[pb.ToolCallDelta, ...] = (), tokens: tuple[int, ...] = ()
) -> pb.GenerateResponse:
    """A message with these deltas; each token has the logprob -0.5 and one alternative, the next token id."""
    message = pb.GenerateResponse(chat=pb.ChatDelta(content=content, reasoning=reasoning, tool_calls=tools))
    for token_id in tokens:
        token = message.tokens.add(token_id=token_id, logprob=-0.5)
        token.top_logprobs.add(token_id=token_id + 1, logprob=-1.5)
    return message


def called(index: int, *, id: str = "", name: str = "", arguments: str = "") -> pb.GenerateResponse:
    return chat_message(tools=(pb.ToolCallDelta(index=index, id=id, name=name, arguments=arguments),))


def ended(*, stop: str = "", length: bool = False, content: str = "", reasoning_tokens: int = 0) -> pb.GenerateResponse:
    message = chat_message(content)
    message.finish_reason = common_pb2.FINISH_REASON_LENGTH if length else common_pb2.FINISH_REASON_STOP
    message.stop_reason = stop
    message.usage.CopyFrom(USAGE)
    message.usage.reasoning_tokens = reasoning_tokens
    message.receipt.why = "test"
    return message


@dataclass(frozen=True)
class Event:
    """One server-sent event."""

    name: str
    data: dict[str, Any]


def events(stream: bytes) -> list[Event]:
    """All events of a stream; each is `event:` and one line of `data:`."""
    found = []
    for block in stream.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        assert name.startswith("event: ")
        assert data.startswith("data: ")
        found.append(Event(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert stream.endswith(b"\n\n")
    return found
