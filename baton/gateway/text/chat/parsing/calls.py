"""The formats in which models write tool calls between other text. Text that is no call comes out as content."""

import re
from collections.abc import Callable

from baton.gateway.text.chat.parsing.argument_types import Schemas
from baton.gateway.text.chat.parsing.collector import Collector
from baton.gateway.text.chat.parsing.cursor import Cursor, Markers, Reading
from baton.gateway.text.chat.parsing.json_call import CallObject, accept_next, end_of_call, json_value, repeats
from baton.gateway.text.chat.parsing.pythonic import PythonCall

CallReader = Callable[[Cursor, Collector], Reading[bool]]

PYTHON_TAGS = ("<|python_tag|>", "<|python_start|>")
PYTHON_END = "<|python_end|>"
PYTHON_MARKS = Markers(*PYTHON_TAGS, PYTHON_END)
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
TOOL_CALL_TAGS = Markers(TOOL_CALL, TOOL_CALL_END)
MISTRAL_MARKS = Markers("[TOOL_CALLS]")
DEEPSEEK_MARKS = Markers(CALL_BEGIN, CALL_END, CALLS_END)
DEEPSEEK_ENDS = Markers("```", CALL_BEGIN, CALL_END, CALLS_END)
NAME = re.compile(r"[\w.\-]")


def content_only(cursor: Cursor, out: Collector) -> Reading[None]:
    yield from cursor.until(Markers(), out.content)


def between_markers(
    cursor: Cursor, out: Collector, markers: Markers, read_calls: CallReader, *, repeated: bool = False
) -> Reading[None]:
    """Content up to a marker, then calls, and so on. A marker that no call follows is content.

    Args:
        repeated: some models repeat the marker.
    """
    while marker := (yield from cursor.until(markers, out.content)):
        if repeated:
            marker += yield from repeats(cursor, marker)
        start = cursor.position
        if not (yield from read_calls(cursor, out)):
            cursor.back(start)
            out.content(marker)


def hermes(cursor: Cursor, out: Collector) -> Reading[None]:
    """`<tool_call>{"name": ..., "arguments": ...}</tool_call>`, of Qwen and Hermes."""
    out.trim_content()

    def read_call(cursor: Cursor, out: Collector) -> Reading[bool]:
        yield from cursor.skip_space()
        call = CallObject(cursor, out, None, bare=False, ends=TOOL_CALL_TAGS)
        if (yield from call.read()):
            yield from end_of_call(cursor, TOOL_CALL_END)
        elif call.begun:
            yield from cursor.skip_until(TOOL_CALL_TAGS)
            yield from cursor.accept(TOOL_CALL_END)
        return call.begun

    yield from between_markers(cursor, out, Markers(TOOL_CALL), read_call, repeated=True)


def mistral(cursor: Cursor, out: Collector) -> Reading[None]:
    """`[TOOL_CALLS]` with an array of objects, or `[TOOL_CALLS]name[ARGS]{...}`."""
    out.trim_content()
    yield from between_markers(cursor, out, MISTRAL_MARKS, _mistral_calls)


def _mistral_calls(cursor: Cursor, out: Collector) -> Reading[bool]:
    yield from cursor.skip_space()
    if (yield from cursor.accept("[")):
        return (yield from _objects(cursor, out, None, separators=",", close="]", bare=False, ends=MISTRAL_MARKS))
    name = yield from cursor.match(NAME)
    if (yield from cursor.accept("[CALL_ID]")):
        yield from cursor.match(NAME)
    yield from cursor.accept("[ARGS]")
    yield from cursor.skip_space()
    if not name or (yield from cursor.peek()) != "{":
        return False
    out.start_call(name)
    yield from json_value(cursor, out.arguments, ends=MISTRAL_MARKS, forget=True)
    yield from end_of_call(cursor)
    return True


def deepseek(cursor: Cursor, out: Collector) -> Reading[None]:
    """Tool tokens of DeepSeek V3 and R1 (arguments in a fenced block) and of V3.1 (bare arguments)."""
    out.trim_content()

    def read_calls(cursor: Cursor, out: Collector) -> Reading[bool]:
        begun = False
        while True:
            start = cursor.position
            yield from cursor.skip_space()
            if not (yield from cursor.accept(CALL_BEGIN)) or not (yield from _deepseek_call(cursor, out)):
                cursor.position = start
                break
            begun = True
        if begun:
            yield from accept_next(cursor, CALLS_END)
        return begun

    yield from between_markers(cursor, out, Markers(CALLS_BEGIN), read_calls)


def _deepseek_call(cursor: Cursor, out: Collector) -> Reading[bool]:
    name = yield from cursor.match(NAME)
    if not (yield from cursor.accept(SEPARATOR)):
        return False
    yield from cursor.skip_space()
    fenced = (yield from cursor.peek()) != "{"
    if fenced:  # what came before is the kind of tool
        name = yield from cursor.match(NAME)
        yield from cursor.skip_space()
        yield from cursor.accept("```json")
        yield from cursor.skip_space()
    if not name or (yield from cursor.peek()) != "{":
        return False
    out.start_call(name)
    if (yield from json_value(cursor, out.arguments, ends=DEEPSEEK_ENDS, forget=True)):
        yield from end_of_call(cursor, *(("```",) if fenced else ()), CALL_END)
    else:
        yield from cursor.skip_until(DEEPSEEK_MARKS)
        yield from cursor.accept(CALL_END)
    return True


def llama(schemas: Schemas) -> Callable[[Cursor, Collector], Reading[None]]:
    """JSON objects separated by semicolons, or a list of Python's calls, at the start or after a tag.

    Args:
        schemas: of the tools. Only an object or call with the name of a tool is a call: the answer may be JSON, too.
    """
    known = frozenset(schemas)

    def read_calls(cursor: Cursor, out: Collector) -> Reading[bool]:
        yield from cursor.skip_space()
        character = yield from cursor.peek()
        if character == "{":
            return (yield from _objects(cursor, out, known, separators=";,", close="", bare=True, ends=PYTHON_MARKS))
        if not (yield from cursor.accept("[")):
            return False
        yield from cursor.skip_space()
        if (yield from cursor.peek()) == "{":
            return (yield from _objects(cursor, out, known, separators=",", close="]", bare=True, ends=PYTHON_MARKS))
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


def _objects(
    cursor: Cursor,
    out: Collector,
    known: frozenset[str] | None,
    *,
    separators: str,
    close: str,
    bare: bool,
    ends: Markers,
) -> Reading[bool]:
    """Reads objects up to `close`. What breaks off after the first call is left to be read as content.

    Returns:
        Whether a call has begun.
    """
    begun = False
    end = cursor.position  # of the last call
    while True:
        yield from cursor.skip_space()
        # Within brackets, what follows a call is a call.
        call = CallObject(cursor, out, None if begun and close else known, bare=bare, ends=ends)
        ended = yield from call.read()
        if not call.begun:
            cursor.back(end)
            return begun
        begun = True
        if not ended:
            return True
        yield from end_of_call(cursor)
        end = cursor.position
        yield from cursor.skip_space()
        if not (yield from cursor.accept_one(separators)):
            cursor.position = end
            if close:
                yield from accept_next(cursor, close)
            return True


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
