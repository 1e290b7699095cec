"""Writes the tool calls of chat completions, whole and in pieces: calls of functions and of custom tools. Pure."""

from typing import Any

from baton.gateway.http.custom_input import CustomInput, whole_text
from baton.gateway.http.custom_tools import CustomTools
from baton.protos.v1 import generation_pb2 as pb

Json = dict[str, Any]


def whole_call(call: pb.ToolCallDelta, custom: CustomTools) -> Json:
    """Returns a call of a whole output."""
    if call.name not in custom.grammars:
        return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    text = call.arguments if call.name == custom.raw_tool else whole_text(call.arguments)
    return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": text}}


class ToolCallStream:
    """The calls of one streamed chat, of all of its choices."""

    def __init__(self, custom: CustomTools) -> None:
        self._custom = custom
        self._called: set[int] = set()  # choices that have calls
        # Calls of custom tools, by choice and call, with what reads their inputs; None: the arguments are the input.
        self._inputs: dict[tuple[int, int], CustomInput | None] = {}

    def has_calls(self, choice: int) -> bool:
        return choice in self._called

    def push(self, message: pb.GenerateResponse) -> list[Json]:
        """Returns the deltas of a message's calls. At the end of an output, the rest of inputs that were held back."""
        choice, chat = message.index, message.chat
        deltas = [delta for piece in chat.tool_calls if (delta := self._delta(choice, piece))]
        if chat.tool_calls:
            self._called.add(choice)
        if message.finish_reason:
            rests = {
                call: reader.finish()
                for (of, call), reader in self._inputs.items()
                if reader is not None and of == choice
            }
            deltas += [{"index": call, "custom": {"input": rest}} for call, rest in rests.items() if rest]
        return deltas

    def _delta(self, choice: int, piece: pb.ToolCallDelta) -> Json | None:
        place = choice, piece.index
        if piece.id and piece.name in self._custom.grammars:
            self._inputs[place] = None if piece.name == self._custom.raw_tool else CustomInput()
            custom = {"name": piece.name, "input": self._input(place, piece)}
            return {"index": piece.index, "id": piece.id, "type": "custom", "custom": custom}
        if place in self._inputs:
            text = self._input(place, piece)
            return {"index": piece.index, "custom": {"input": text}} if text else None
        function = {"arguments": piece.arguments}
        if not piece.id:
            return {"index": piece.index, "function": function}
        function = {"name": piece.name, **function}
        return {"index": piece.index, "id": piece.id, "type": "function", "function": function}

    def _input(self, place: tuple[int, int], piece: pb.ToolCallDelta) -> str:
        reader = self._inputs[place]
        return piece.arguments if reader is None else reader.push(piece.arguments)
