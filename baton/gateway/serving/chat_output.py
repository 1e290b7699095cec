"""An output's text as parts of a chat's answer. Pure."""

from baton.gateway.text.chat.types import OutputParser, ParsedDelta
from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb


class ChatOutput:
    """The messages of one output, with `chat` filled in.

    A message has reasoning before answer before tool calls. Where the model has them in another order, the message is
    followed by others that have only `chat`.

    Args:
        tokens_last: the last of these messages has the tokens, not the first one: a client that has tokens then has all
            of what they say.
    """

    def __init__(self, parser: OutputParser, *, tokens_last: bool = False) -> None:
        self._parser = parser
        self._tokens_last = tokens_last

    def messages(self, message: pb.GenerateResponse) -> list[pb.GenerateResponse]:
        """The message as the client gets it. The last one has how the output ended."""
        deltas = self._parser.push(message.text) if message.text else []
        if message.finish_reason:
            cut = message.finish_reason == common_pb2.FINISH_REASON_LENGTH
            deltas = [*deltas, *self._parser.finish(cut=cut)]
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


def _follows(part: pb.ChatDelta, delta: ParsedDelta) -> bool:
    """Whether the delta may join the part, which keeps no order between its fields."""
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
    """The first message has the text, the last one how the output ended."""
    messages = [pb.GenerateResponse(index=message.index, chat=part) for part in parts]
    first, last = messages[0], messages[-1]
    first.text, first.request_id, first.revision = message.text, message.request_id, message.revision
    (last if tokens_last else first).tokens.extend(message.tokens)
    first.prompt_logprobs.extend(message.prompt_logprobs)
    last.finish_reason, last.stop_reason = message.finish_reason, message.stop_reason
    if message.HasField("usage"):
        last.usage.CopyFrom(message.usage)
    if message.HasField("receipt"):
        last.receipt.CopyFrom(message.receipt)
    return messages
