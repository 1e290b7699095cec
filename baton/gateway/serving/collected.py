"""Collects the messages of one request into whole outputs. Pure."""

from dataclasses import dataclass, field

from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb


@dataclass
class _Output:
    """The collected part of one output."""

    message: pb.Output
    text: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, pb.ToolCallDelta] = field(default_factory=dict)

    def add_chat(self, delta: pb.ChatDelta) -> None:
        self.content.append(delta.content)
        self.reasoning.append(delta.reasoning)
        for piece in delta.tool_calls:
            call = self.calls.setdefault(piece.index, pb.ToolCallDelta(index=piece.index))
            call.id = call.id or piece.id
            call.name = call.name or piece.name
            call.arguments += piece.arguments

    def finish(self) -> pb.Output:
        self.message.text = "".join(self.text)
        if self.content:
            self.message.chat.content = "".join(self.content)
            self.message.chat.reasoning = "".join(self.reasoning)
            self.message.chat.tool_calls.extend(self.calls[index] for index in sorted(self.calls))
        return self.message


class AnswerCollector:
    """Collects all messages of one request."""

    def __init__(self) -> None:
        self._outputs: dict[int, _Output] = {}
        self._usage = common_pb2.Usage()
        self._prompt_logprobs: list[common_pb2.PromptLogprob] = []

    async def write(self, message: pb.GenerateResponse) -> None:
        """Calls `push`; usable as `write` of `Serving.generate`."""
        self.push(message)

    def push(self, message: pb.GenerateResponse) -> bytes:
        """Adds a message. Returns b"", because nothing is sent before the end."""
        if message.HasField("usage"):
            self._usage = message.usage
        if message.notice:
            return b""
        if message.prompt_logprobs and not self._prompt_logprobs:
            self._prompt_logprobs = list(message.prompt_logprobs)
        output = self._outputs.get(message.index)
        if output is None:
            output = self._outputs[message.index] = _Output(pb.Output(index=message.index))
        if message.revision:
            output.message.revision = message.revision
        output.text.append(message.text)
        output.message.tokens.extend(message.tokens)
        if message.HasField("chat"):
            output.add_chat(message.chat)
        if message.finish_reason:
            output.message.finish_reason = message.finish_reason
            output.message.stop_reason = message.stop_reason
            output.message.receipt.CopyFrom(message.receipt)
        return b""

    def response(self, request_id: str = "") -> pb.CompleteResponse:
        """The whole response. Call it once, after the request has finished."""
        return pb.CompleteResponse(
            outputs=[self._outputs[index].finish() for index in sorted(self._outputs)],
            usage=self._usage,
            prompt_logprobs=self._prompt_logprobs,
            request_id=request_id,
        )
