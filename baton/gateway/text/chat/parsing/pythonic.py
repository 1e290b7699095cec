"""Reads function calls in Python's syntax, as Llama 4 and Gemma 3 write them."""

import re

from baton.gateway.text.chat.parsing.argument_types import ArgumentTypes, Schemas, literal
from baton.gateway.text.chat.parsing.collector import Collector
from baton.gateway.text.chat.parsing.cursor import Cursor, Reading
from baton.gateway.text.chat.parsing.json_rewriter import quoted

NAME = re.compile(r"[\w.\-]", re.ASCII)
OPENS = {"(": ")", "[": "]", "{": "}"}
VALUE_CHARS_MAX = 1 << 20


class PythonCall:
    """Reads `name(key=value, ...)`. Values are Python's literals, or JSON, or else text as the schema takes it.

    Arguments without a name are left out.

    Args:
        any_name: whether a call may have a name that is not a tool's.
    """

    def __init__(self, cursor: Cursor, out: Collector, schemas: Schemas, *, any_name: bool = False) -> None:
        self._cursor = cursor
        self._out = out
        self._schemas = schemas
        self._any_name = any_name
        self.begun = False

    def read(self) -> Reading[bool]:
        """Reads the call. Returns whether it ended well. Otherwise, if it has not `begun`, it is not a call."""
        cursor = self._cursor
        name = yield from cursor.match(NAME)
        known = self._any_name or name in self._schemas
        if not name or not known or not (yield from cursor.accept("(")):
            return False
        self.begun = True
        self._out.start_call(name)
        types = ArgumentTypes(self._schemas.get(name, {}))
        before = "{"
        while True:
            yield from cursor.skip_space()
            ended = yield from cursor.accept(")")
            if ended or not (yield from cursor.peek()):
                if ended or not cursor.cut:
                    self._out.arguments("{}" if before == "{" else "}")
                return ended
            member = yield from self._member(types)
            if member:
                self._out.arguments(before + member)
                before = ", "
            yield from cursor.skip_space()
            yield from cursor.accept(",")
            cursor.forget()

    def _member(self, types: ArgumentTypes) -> Reading[str]:
        """Reads `key=value` and returns it as a member of a JSON object; empty: it has no key, or was cut off."""
        cursor = self._cursor
        start = cursor.position
        key = yield from cursor.match(NAME)
        yield from cursor.skip_space()
        named = key and (yield from cursor.accept("="))
        if not named:
            cursor.position = start
        text = yield from self._value()
        if not named or (cursor.cut and not (yield from cursor.peek())):
            return ""
        return f"{quoted(key)}: {literal(text) or types.of(key).read(text)}"

    def _value(self) -> Reading[str]:
        """Reads and returns a value up to the comma or parenthesis after it, or to the text's end."""
        cursor = self._cursor
        start = cursor.position
        closes: list[str] = []
        quote = ""
        while (character := (yield from cursor.peek())) and cursor.position - start < VALUE_CHARS_MAX:
            if quote:
                if character == "\\":
                    cursor.position += 1
                    if not (yield from cursor.have(1)):
                        break
                elif character == quote:
                    quote = ""
            elif character in "\"'":
                quote = character
            elif character in OPENS:
                closes.append(OPENS[character])
            elif closes and character == closes[-1]:
                closes.pop()
            elif not closes and character in ",)":
                break
            cursor.position += 1
        return cursor.text[start : cursor.position].strip()
