"""Reads Llama's calls: JSON objects with semicolons between them, or a list of Python's calls."""

from collections.abc import Callable

from baton.gateway.text.chat.parsing.argument_types import Schemas
from baton.gateway.text.chat.parsing.call_list import between_markers, objects
from baton.gateway.text.chat.parsing.collector import Collector
from baton.gateway.text.chat.parsing.cursor import Cursor, Markers, Reading
from baton.gateway.text.chat.parsing.json_call import accept_next
from baton.gateway.text.chat.parsing.pythonic import PythonCall

PYTHON_TAGS = ("<|python_tag|>", "<|python_start|>")
PYTHON_END = "<|python_end|>"
MARKS = Markers(*PYTHON_TAGS, PYTHON_END)


def llama(schemas: Schemas) -> Callable[[Cursor, Collector], Reading[None]]:
    """Returns the reader of calls at the start of the answer or after a tag.

    Args:
        schemas: of the tools. An answer may be JSON, too, so only an object with the name of a tool is a call.
    """
    known = frozenset(schemas)

    def read_calls(cursor: Cursor, out: Collector) -> Reading[bool]:
        yield from cursor.skip_space()
        character = yield from cursor.peek()
        if character == "{":
            return (yield from objects(cursor, out, known, separators=";,", close="", bare=True, ends=MARKS))
        if not (yield from cursor.accept("[")):
            return False
        yield from cursor.skip_space()
        if (yield from cursor.peek()) == "{":
            return (yield from objects(cursor, out, known, separators=",", close="]", bare=True, ends=MARKS))
        return (yield from _python_calls(cursor, out, schemas))

    def read(cursor: Cursor, out: Collector) -> Reading[None]:
        out.trim_content()
        start = cursor.position
        if not (yield from read_calls(cursor, out)):
            cursor.back(start)
        yield from between_markers(cursor, out, Markers(*PYTHON_TAGS), read_tagged)

    def read_tagged(cursor: Cursor, out: Collector) -> Reading[bool]:
        begun = yield from read_calls(cursor, out)
        if begun:
            yield from accept_next(cursor, PYTHON_END)
        return begun

    return read


def _python_calls(cursor: Cursor, out: Collector, schemas: Schemas) -> Reading[bool]:
    begun = False
    end = cursor.position  # of the last call
    while True:
        yield from cursor.skip_space()
        call = PythonCall(cursor, out, schemas, any_name=begun)
        ended = yield from call.read()
        begun = begun or call.begun
        if not call.begun:
            cursor.back(end)
        if not ended:
            return begun
        end = cursor.position
        yield from cursor.skip_space()
        if not (yield from cursor.accept(",")):
            yield from accept_next(cursor, "]")
            return True
