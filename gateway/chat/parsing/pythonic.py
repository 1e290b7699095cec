"""Tool calls that are a list of Python's function calls, as Llama 4 writes them."""

import ast
import json
import re

from gateway.chat.parsing.collector import Collector
from gateway.chat.parsing.cursor import Cursor, Reading

NAME = re.compile(r"[\w.\-]", re.ASCII)
LITERALS = {"true": True, "false": False, "null": None}
OPENS = {"(": ")", "[": "]", "{": "}"}
VALUE_CHARS_MAX = 1 << 20


class PythonCall:
    """Reads `name(key=value, ...)`. Values are Python's literals, or JSON.

    Args:
        known: names of calls; anything else is no call.
    """

    def __init__(self, cursor: Cursor, out: Collector, known: frozenset[str]) -> None:
        self._cursor = cursor
        self._out = out
        self._known = known
        self.begun = False

    def read(self) -> Reading[bool]:
        """Returns whether the call ended well. If not, and it has not `begun`, it is no call."""
        cursor = self._cursor
        name = yield from cursor.match(NAME)
        if name not in self._known or not (yield from cursor.accept("(")):
            return False
        self.begun = True
        self._out.start_call(name)
        before = "{"
        while True:
            yield from cursor.skip_space()
            if (yield from cursor.accept(")")):
                self._out.arguments("{}" if before == "{" else "}")
                return True
            member = yield from self._member()
            if member is None:
                return False
            self._out.arguments(before + member)
            before = ", "
            yield from cursor.skip_space()
            yield from cursor.accept(",")

    def _member(self) -> Reading[str | None]:
        """`key=value` as a member of a JSON object; None, with the cursor back at the key: it is none."""
        cursor = self._cursor
        start = cursor.position
        key = yield from cursor.match(NAME)
        yield from cursor.skip_space()
        if key and (yield from cursor.accept("=")):
            value = yield from self._value()
            if value is not None:
                return f"{json.dumps(key)}: {value}"
        cursor.position = start
        return None

    def _value(self) -> Reading[str | None]:
        """Reads up to the comma or parenthesis after a value, and returns the value as JSON; None: it is none."""
        cursor = self._cursor
        start = cursor.position
        closes: list[str] = []
        quote = ""
        while (character := (yield from cursor.peek())) and cursor.position - start < VALUE_CHARS_MAX:
            if quote:
                if character == "\\":
                    cursor.position += 1
                    if not (yield from cursor.have(1)):
                        return None
                elif character == quote:
                    quote = ""
            elif character in "\"'":
                quote = character
            elif character in OPENS:
                closes.append(OPENS[character])
            elif closes and character == closes[-1]:
                closes.pop()
            elif not closes and character in ",)":
                return json_of_literal(cursor.text[start : cursor.position].strip())
            cursor.position += 1
        return None


def json_of_literal(text: str) -> str | None:
    """JSON, or a literal of Python, as JSON; None: it is neither."""
    try:
        return json.dumps(json.loads(text), ensure_ascii=False)
    except (ValueError, RecursionError):
        pass
    try:
        value = LITERALS[text] if text in LITERALS else ast.literal_eval(text)
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
