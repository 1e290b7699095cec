"""The formats in which models write tool calls between other text. Text that is no call comes out as content."""

import re
from collections.abc import Callable

from gateway.chat.parsing.collector import Collector
from gateway.chat.parsing.cursor import Cursor, Markers, Reading
from gateway.chat.parsing.json_call import CallObject, json_value
from gateway.chat.parsing.pythonic import PythonCall

CallReader = Callable[[Cursor, Collector], Reading[bool]]

PYTHON_TAGS = ("<|python_tag|>", "<|python_start|>")
PYTHON_END = "<|python_end|>"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
NAME = re.compile(r"[\w.\-]")


def content_only(cursor: Cursor, out: Collector) -> Reading[None]:
    yield from cursor.until(Markers(), out.content)


def between_markers(cursor: Cursor, out: Collector, markers: Markers, read_calls: CallReader) -> Reading[None]:
    """Content up to a marker, then calls, and so on. A marker that no call follows is content."""
    while marker := (yield from cursor.until(markers, out.content)):
        start = cursor.position
        if not (yield from read_calls(cursor, out)):
            cursor.position = start
            out.content(marker)


def hermes(cursor: Cursor, out: Collector) -> Reading[None]:
    """`<tool_call>{"name": ..., "arguments": ...}</tool_call>`, of Qwen and Hermes."""
    out.trim_content()

    def read_call(cursor: Cursor, out: Collector) -> Reading[bool]:
        yield from cursor.skip_space()
        call = CallObject(cursor, out, None, bare=False)
        if (yield from call.read()):
            yield from skip_to(cursor, "</tool_call>")
        return call.begun

    yield from between_markers(cursor, out, Markers("<tool_call>"), read_call)


def mistral(cursor: Cursor, out: Collector) -> Reading[None]:
    """`[TOOL_CALLS]` with an array of objects, or `[TOOL_CALLS]name[ARGS]{...}`."""
    out.trim_content()
    yield from between_markers(cursor, out, Markers("[TOOL_CALLS]"), _mistral_calls)


def _mistral_calls(cursor: Cursor, out: Collector) -> Reading[bool]:
    yield from cursor.skip_space()
    if (yield from cursor.accept("[")):
        return (yield from _objects(cursor, out, None, separators=",", close="]", bare=False))
    name = yield from cursor.match(NAME)
    if (yield from cursor.accept("[CALL_ID]")):
        yield from cursor.match(NAME)
    yield from cursor.accept("[ARGS]")
    yield from cursor.skip_space()
    if not name or (yield from cursor.peek()) != "{":
        return False
    out.start_call(name)
    yield from json_value(cursor, out.arguments, forget=True)
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
            yield from skip_to(cursor, CALLS_END)
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
    if (yield from json_value(cursor, out.arguments, forget=True)):
        if fenced:
            yield from skip_to(cursor, "```")
        yield from skip_to(cursor, CALL_END)
    return True


def llama(known: frozenset[str]) -> Callable[[Cursor, Collector], Reading[None]]:
    """JSON objects separated by semicolons, or a list of Python's calls, at the start or after a tag.

    Args:
        known: the tools' names. Only an object or call with such a name is a call: the answer may be JSON, too.
    """

    def read_calls(cursor: Cursor, out: Collector) -> Reading[bool]:
        yield from cursor.skip_space()
        character = yield from cursor.peek()
        if character == "{":
            return (yield from _objects(cursor, out, known, separators=";,", close="", bare=True))
        if not (yield from cursor.accept("[")):
            return False
        yield from cursor.skip_space()
        if (yield from cursor.peek()) == "{":
            return (yield from _objects(cursor, out, known, separators=",", close="]", bare=True))
        return (yield from _python_calls(cursor, out, known))

    def read(cursor: Cursor, out: Collector) -> Reading[None]:
        out.trim_content()
        start = cursor.position
        if not (yield from read_calls(cursor, out)):
            cursor.position = start
        yield from between_markers(cursor, out, Markers(*PYTHON_TAGS), read_tagged)

    def read_tagged(cursor: Cursor, out: Collector) -> Reading[bool]:
        begun = yield from read_calls(cursor, out)
        if begun:
            yield from skip_to(cursor, PYTHON_END)
        return begun

    return read


def _objects(
    cursor: Cursor, out: Collector, known: frozenset[str] | None, *, separators: str, close: str, bare: bool
) -> Reading[bool]:
    """Reads objects up to `close`. What breaks off after the first call is left to be read as content.

    Returns:
        Whether a call has begun.
    """
    begun = False
    end = cursor.position  # of the last call
    while True:
        yield from cursor.skip_space()
        call = CallObject(cursor, out, known, bare=bare)
        ended = yield from call.read()
        if not call.begun:
            cursor.position = end
            return begun
        begun = True
        if not ended:
            return True
        end = cursor.position
        yield from cursor.skip_space()
        if not (yield from cursor.accept_one(separators)):
            cursor.position = end
            if close:
                yield from skip_to(cursor, close)
            return True


def _python_calls(cursor: Cursor, out: Collector, known: frozenset[str]) -> Reading[bool]:
    begun = False
    end = cursor.position  # of the last call
    while True:
        yield from cursor.skip_space()
        call = PythonCall(cursor, out, known)
        ended = yield from call.read()
        begun = begun or call.begun
        if not call.begun:
            cursor.position = end
        if not ended:
            return begun
        end = cursor.position
        yield from cursor.skip_space()
        if not (yield from cursor.accept(",")):
            yield from skip_to(cursor, "]")
            return True


def skip_to(cursor: Cursor, literal: str) -> Reading[None]:
    """Reads white space and `literal`; nothing if something else comes."""
    start = cursor.position
    yield from cursor.skip_space()
    if not (yield from cursor.accept(literal)):
        cursor.position = start
