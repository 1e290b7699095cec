"""Tool calls as Qwen3-Coder and Qwen 3.5 write them: one element for each argument. The schema knows its type."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from gateway.chat.parsing.calls import between_markers, skip_to
from gateway.chat.parsing.collector import Collector
from gateway.chat.parsing.cursor import Cursor, Markers, Reading
from gateway.chat.parsing.pythonic import json_of_literal

IN_TAG = re.compile(r"[^<>\n]")
VALUE_END = Markers("\n</parameter>", "</parameter>")
REFERENCES_MAX = 16

Schemas = Mapping[str, Mapping[str, Any]]  # of each tool's arguments, by its name


def xml_calls(schemas: Schemas) -> Callable[[Cursor, Collector], Reading[None]]:
    """`<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`."""

    def read_call(cursor: Cursor, out: Collector) -> Reading[bool]:
        yield from cursor.skip_space()
        name = yield from _tag(cursor, "<function=")
        if not name:
            return False
        out.start_call(name)
        schema = schemas.get(name, {})
        before = "{"
        while True:
            yield from cursor.skip_space()
            key = yield from _tag(cursor, "<parameter=")
            if not key:
                break
            yield from cursor.accept("\n")
            out.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            if not (yield from _value(cursor, out, text=is_text(schema.get("properties", {}).get(key), schema))):
                return True
            before = ", "
        if (yield from cursor.accept("</function>")):
            out.arguments("{}" if before == "{" else "}")
            yield from skip_to(cursor, "</tool_call>")
        return True

    def read(cursor: Cursor, out: Collector) -> Reading[None]:
        out.trim_content()
        yield from between_markers(cursor, out, Markers("<tool_call>"), read_call)

    return read


def _tag(cursor: Cursor, begin: str) -> Reading[str]:
    """Reads `begin`, a name and `>`, and returns the name; empty: it is no such tag."""
    start = cursor.position
    if (yield from cursor.accept(begin)):
        name = yield from cursor.match(IN_TAG)
        if name and (yield from cursor.accept(">")):
            return name.strip()
    cursor.position = start
    return ""


def _value(cursor: Cursor, out: Collector, *, text: bool) -> Reading[bool]:
    """Passes a value on as JSON; a string as it comes. Returns whether it ended."""
    if text:
        out.arguments('"')
        end = yield from cursor.until(
            VALUE_END, lambda piece: out.arguments(json.dumps(piece, ensure_ascii=False)[1:-1])
        )
        out.arguments('"' if end else "")
        return bool(end)
    pieces: list[str] = []
    end = yield from cursor.until(VALUE_END, pieces.append)
    value = "".join(pieces)
    if end:
        value = json_of_literal(value.strip()) or json.dumps(value, ensure_ascii=False)
    out.arguments(value)
    return bool(end)


def is_text(schema: Any, root: Mapping[str, Any]) -> bool:
    """Whether the argument is a string, as one without a type is taken to be. `root` has what `$ref` points to."""
    for _ in range(REFERENCES_MAX):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            break
        schema = _pointed_to(str(schema["$ref"]), root)
    if not isinstance(schema, Mapping) or "type" not in schema:
        return not (isinstance(schema, Mapping) and schema.keys() & {"anyOf", "oneOf", "allOf", "$ref"})
    return bool(schema["type"] in ("string", ["string"]))


def _pointed_to(pointer: str, root: Any) -> Any:
    for key in pointer.removeprefix("#/").split("/"):
        root = root.get(key) if isinstance(root, Mapping) else None
    return root
