"""Writes the tool calls of chat completions, whole and in pieces: calls of functions and of custom tools. Pure."""

from typing import Any

from baton.gateway.http.custom_input import CustomInput, whole_text
from baton.gateway.http.custom_tools import CustomTools
from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb

Json = dict[str, Any]


def whole_calls(output: pb.Output, custom: CustomTools, answer_id: str) -> list[Json]:
    """Returns the calls of a whole output. `answer_id` distinguishes the ids of calls that have none of their own."""
    calls = [_whole_call(call, custom) for call in output.chat.tool_calls]
    # A grammar may allow an empty input.
    if custom.raw_tool and (output.chat.content or output.finish_reason == common_pb2.FINISH_REASON_STOP):
        calls.append(_raw_call(output.index, output.chat.content, custom, answer_id))
    return calls


class ToolCallStream:
    """The calls of one streamed chat, of all of its choices. For its arguments, see `whole_calls`."""

    def __init__(self, custom: CustomTools, answer_id: str) -> None:
        self._custom = custom
        self._answer_id = answer_id
        self._called: set[int] = set()  # choices that have calls
        self._inputs: dict[tuple[int, int], CustomInput] = {}  # of calls of custom tools, by choice and call

    def has_calls(self, choice: int) -> bool:
        return choice in self._called

    def push(self, message: pb.GenerateResponse) -> list[Json]:
        """Returns the deltas of a message's calls. At the end of an output, the rest of inputs that were held back."""
        choice, chat = message.index, message.chat
        deltas = [delta for piece in chat.tool_calls if (delta := self._delta(choice, piece))]
        is_empty = message.finish_reason == common_pb2.FINISH_REASON_STOP and choice not in self._called
        if self._custom.raw_tool and (chat.content or is_empty):
            deltas.append(self._raw_delta(choice, chat.content))
        elif chat.tool_calls:
            self._called.add(choice)
        if message.finish_reason:
            rests = {call: reader.finish() for (of, call), reader in self._inputs.items() if of == choice}
            deltas += [{"index": call, "custom": {"input": rest}} for call, rest in rests.items() if rest]
        return deltas

    def _delta(self, choice: int, piece: pb.ToolCallDelta) -> Json | None:
        place = choice, piece.index
        if piece.id and piece.name in self._custom.grammars:
            reader = self._inputs[place] = CustomInput()
            custom = {"name": piece.name, "input": reader.push(piece.arguments)}
            return {"index": piece.index, "id": piece.id, "type": "custom", "custom": custom}
        if place in self._inputs:
            text = self._inputs[place].push(piece.arguments)
            return {"index": piece.index, "custom": {"input": text}} if text else None
        function = {"arguments": piece.arguments}
        if not piece.id:
            return {"index": piece.index, "function": function}
        function = {"name": piece.name, **function}
        return {"index": piece.index, "id": piece.id, "type": "function", "function": function}

    def _raw_delta(self, choice: int, text: str) -> Json:
        if choice in self._called:
            return {"index": 0, "custom": {"input": text}}
        self._called.add(choice)
        return {"index": 0, **_raw_call(choice, text, self._custom, self._answer_id)}


def _whole_call(call: pb.ToolCallDelta, custom: CustomTools) -> Json:
    if call.name in custom.grammars:
        return {
            "id": call.id,
            "type": "custom",
            "custom": {"name": call.name, "input": whole_text(call.arguments)},
        }
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _raw_call(choice: int, text: str, custom: CustomTools, answer_id: str) -> Json:
    """Returns the call, or its beginning, of an output that is the tool's input itself. A parser gave it no id."""
    call_id = f"call_{answer_id.rpartition('-')[2]}_{choice}"
    return {"id": call_id, "type": "custom", "custom": {"name": custom.raw_tool, "input": text}}
