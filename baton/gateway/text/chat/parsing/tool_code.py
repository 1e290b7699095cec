"""Reads Gemma 3's calls: Python's calls in a block of code, ```` ```tool_code ````."""

from collections.abc import Callable

from baton.gateway.text.chat.parsing.argument_types import Schemas
from baton.gateway.text.chat.parsing.call_list import between_markers
from baton.gateway.text.chat.parsing.collector import Collector
from baton.gateway.text.chat.parsing.cursor import Cursor, Markers, Reading
from baton.gateway.text.chat.parsing.json_call import accept_next
from baton.gateway.text.chat.parsing.pythonic import PythonCall

FENCE, FENCE_END = "```tool_code", "```"
SEPARATORS = ",;)]"


def tool_code(schemas: Schemas) -> Callable[[Cursor, Collector], Reading[None]]:
    """Returns the reader of calls, one in each line, in a list, or as an argument of `print`.

    Args:
        schemas: of the tools. Other code is content, so a call must name a tool.
    """

    def read_calls(cursor: Cursor, out: Collector) -> Reading[bool]:
        begun = False
        end = cursor.position  # of the last call
        while True:
            yield from cursor.skip_space()
            yield from cursor.accept("[")
            yield from cursor.accept("print(")
            call = PythonCall(cursor, out, schemas)
            ended = yield from call.read()
            if not call.begun:
                cursor.back(end)
                break
            begun = True
            if not ended:
                return True
            while (yield from _separator(cursor)):
                pass
            end = cursor.position
        if begun:
            yield from accept_next(cursor, FENCE_END)
        return begun

    def read(cursor: Cursor, out: Collector) -> Reading[None]:
        out.trim_content()
        yield from between_markers(cursor, out, Markers(FENCE), read_calls)

    return read


def _separator(cursor: Cursor) -> Reading[bool]:
    yield from cursor.skip_space()
    return bool((yield from cursor.accept_one(SEPARATORS)))
