"""Whole outputs, put together from a request's messages. Pure."""

from dataclasses import dataclass, field

from baton.convert import finish_reason_from_proto
from protos.baton.v1 import common_pb2
from protos.baton.v1 import generation_pb2 as pb


def finish_name(reason: common_pb2.FinishReason.ValueType) -> str:
    """ "stop" or "length", as OpenAI calls them; empty while the output goes on."""
    return finish_reason_from_proto(reason) or ""


@dataclass
class ToolCall:
    """One whole tool call; `arguments` is JSON."""

    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass
class Collected:
    """One whole output.

    Attributes:
        finish_reason: "stop" or "length".
        content, reasoning, tool_calls: of a chat's answer.
        usage: of the whole request.
        prompt_logprobs: of the request, where they are wanted.
    """

    index: int
    text: str = ""
    tokens: list[common_pb2.Token] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str = ""
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    receipt: common_pb2.Receipt = field(default_factory=common_pb2.Receipt)
    usage: common_pb2.Usage = field(default_factory=common_pb2.Usage)
    prompt_logprobs: list[common_pb2.PromptLogprob] = field(default_factory=list)

    def add(self, message: pb.GenerateResponse) -> None:
        self.text += message.text
        self.tokens += message.tokens
        if message.HasField("chat"):
            self._add_chat(message.chat)
        if message.finish_reason:
            self.finish_reason = finish_name(message.finish_reason)
            self.stop_reason = message.stop_reason
            self.receipt = message.receipt

    def _add_chat(self, delta: pb.ChatDelta) -> None:
        self.content += delta.content
        self.reasoning += delta.reasoning
        for piece in delta.tool_calls:
            while len(self.tool_calls) <= piece.index:
                self.tool_calls.append(ToolCall())
            call = self.tool_calls[piece.index]
            call.id += piece.id
            call.name += piece.name
            call.arguments += piece.arguments


class Collector:
    """Collects all outputs of one request."""

    def __init__(self) -> None:
        self._outputs: dict[int, Collected] = {}
        self._usage = common_pb2.Usage()
        self._prompt_logprobs: list[common_pb2.PromptLogprob] = []

    def push(self, message: pb.GenerateResponse) -> bytes:
        """Takes the next message; nothing is to be sent yet."""
        output = self._outputs.get(message.index)
        if output is None:
            output = self._outputs[message.index] = Collected(message.index)
        output.add(message)
        if message.HasField("usage"):
            self._usage = message.usage
        self._prompt_logprobs += message.prompt_logprobs
        return b""

    def outputs(self) -> list[Collected]:
        """All outputs by index, once the last message has come."""
        outputs = [self._outputs[index] for index in sorted(self._outputs)]
        for output in outputs:
            output.usage, output.prompt_logprobs = self._usage, self._prompt_logprobs
        return outputs
