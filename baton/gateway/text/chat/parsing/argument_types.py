"""Reads arguments that calls carry as text without a type, by the tools' schemas.

The readers of all formats without types use it. The grammars of forced calls use it to know what a value may be.
"""

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import unquote

from baton.gateway.text.chat.parsing.json_rewriter import DEPTH_MAX, INTEGER, NUMBER, number, quoted, well_formed
from baton.gateway.text.chat.parsing.lenient_json import json_so_far, rewritten, strict_json

Schemas = Mapping[str, Mapping[str, Any]]  # of each tool's arguments, by its name

SCHEMAS_MAX = 256  # looked at for one argument: references may be endless
VALUES_MAX = 1 << 14  # of all enumerations for one argument; a further one says nothing
NULL_CHARS_MAX = 64  # with the space around it
PYTHON_CHARS_MAX = 64 << 10
INTEGERS_OF_DOUBLES = 1 << 53
# Names of types in JSON Schema, and in schemas that were made from other languages.
TYPES = {
    "string": "string", "str": "string", "text": "string", "varchar": "string", "char": "string", "enum": "string",
    "integer": "integer", "int": "integer", "int32": "integer", "int64": "integer", "long": "integer",
    "number": "number", "float": "number", "double": "number", "boolean": "boolean", "bool": "boolean", "null": "null",
    "object": "object", "dict": "object", "array": "array", "list": "array", "tuple": "array", "any": "any",
}  # fmt: skip
# Keywords by which a schema without a type shows which type it describes.
KEYWORDS = {
    "object": {"properties", "required", "additionalProperties", "patternProperties", "propertyNames"},
    "array": {"items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}
WORDS = {"true": "true", "True": "true", "false": "false", "False": "false"}
PYTHON_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
PYTHON_ESCAPES = "\n\\'\"abfnrtv01234567xNuU"


@dataclass(frozen=True)
class Alternative:
    """One thing that a schema allows.

    Attributes:
        type: of JSON; "any": what the text looks like.
        constant: the only value, as JSON; None: any value of the type.
    """

    type: str
    constant: str | None = None


TEXT, NULL, ANY = Alternative("string"), Alternative("null"), Alternative("any")


@dataclass(frozen=True)
class ArgumentType:
    """The type of one argument.

    Attributes:
        alternatives: what the schema allows, in its order.
    """

    alternatives: tuple[Alternative, ...] = (TEXT,)

    @property
    def is_text(self) -> bool:
        """Whether every text is a value."""
        return TEXT in self.alternatives

    @cached_property
    def begins_with_text(self) -> bool:
        """Whether every text except `null` is a string."""
        return next((each for each in self.alternatives if each != NULL), None) == TEXT

    def is_null(self, text: str) -> bool:
        return NULL in self.alternatives and len(text) <= NULL_CHARS_MAX and text.strip() == "null"

    def may_become_null(self, text: str) -> bool:
        return NULL in self.alternatives and len(text) <= NULL_CHARS_MAX and "null".startswith(text.strip())

    def read(self, text: str) -> str:
        """Returns the text as JSON: `null` where that is allowed, else the first alternative that it fits. Otherwise it
        is a string or, if the schema has objects or arrays, the value that it looks like."""
        if self.is_null(text):
            return "null"
        given = _Given(text, exact=self.is_text)
        for alternative in self.alternatives:
            found = given.fit(alternative)
            if found is not None:
                return found
        if any(each.type in ("object", "array") for each in self.alternatives):
            return literal(text.strip()) or quoted(text)
        return quoted(text)


class ArgumentText:
    """Converts the text of one argument to JSON: a string as it comes, anything else at its end."""

    def __init__(self, type: ArgumentType) -> None:
        self._type = type
        self._held: list[str] = []
        self._streams = False

    def push(self, text: str) -> str:
        if self._streams:
            return quoted(text)[1:-1]
        self._held.append(text)
        if not self._type.begins_with_text or self._type.may_become_null(held := "".join(self._held)):
            return ""
        self._streams = True
        return quoted(held)[:-1]

    def finish(self) -> str:
        return '"' if self._streams else self._type.read("".join(self._held))

    def held(self) -> str:
        """Returns JSON for the rest of a text that was cut off."""
        if self._streams:
            return ""
        held = "".join(self._held)
        return quoted(held)[:-1] if self._type.begins_with_text else json_so_far(held.strip())


class ArgumentTypes:
    """Knows the types of one tool's arguments.

    Args:
        schema: the schema of the object that has all arguments.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._types: dict[str, ArgumentType] = {}

    def of(self, name: str, otherwise: Alternative = TEXT) -> ArgumentType:
        """Returns the type of an argument, which is `otherwise` if the schema does not restrict it."""
        if name not in self._types:
            walk = _Walk(self._schema)
            found = walk.member(self._schema, name)
            self._types[name] = ArgumentType(tuple(walk.alternatives(found) or (otherwise,)))
        return self._types[name]


class _Walk:
    """Walks through a bounded number of schemas and enumerated values within one schema.

    Args:
        root: the schema that references point into.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._left = SCHEMAS_MAX
        self._values_left = VALUES_MAX

    def member(self, schema: Any, name: str) -> Any:
        """Returns the schema of an object's member; None: there is none."""
        if not self._enter(schema):
            return None
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            return properties[name]
        for part in self._parts(schema):
            found = self.member(part, name)
            if found is not None:
                return found
        more = schema.get("additionalProperties")
        return more if isinstance(more, Mapping) else None

    def alternatives(self, schema: Any) -> list[Alternative] | None:
        """Returns what a schema allows; None: it does not restrict the type."""
        if not self._enter(schema):
            return None
        found: list[Alternative] | None = None
        for said in self._each_said(schema):
            found = said if found is None else _common(found, said) or found
        if found is None:
            found = next(([Alternative(type)] for type, words in KEYWORDS.items() if words & schema.keys()), None)
        if schema.get("nullable") is True:
            found = [*(found or (TEXT,)), NULL]
        return found

    def _enter(self, schema: Any) -> bool:
        self._left -= 1
        return isinstance(schema, Mapping) and self._left >= 0

    def _each_said(self, schema: Mapping[str, Any]) -> Iterator[list[Alternative]]:
        """Yields what each keyword of the schema allows."""
        if "const" in schema:
            yield [_constant(schema["const"])]
        values = schema.get("enum")
        if isinstance(values, list) and 0 < len(values) <= self._values_left:
            self._values_left -= len(values)
            yield [_constant(value) for value in values]
        named = schema.get("type")
        names = [named] if isinstance(named, str) else named if isinstance(named, list) else []
        types = [Alternative(TYPES.get(str(name).lower(), "any")) for name in names]
        if types:
            yield types
        for keyword in ("anyOf", "oneOf"):
            if isinstance(members := schema.get(keyword), list) and members:
                yield list(dict.fromkeys(each for member in members for each in self.alternatives(member) or (TEXT,)))
        for part in self._required_parts(schema):
            said = self.alternatives(part)
            if said is not None:
                yield said

    def _parts(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        yield from self._required_parts(schema)
        for keyword in ("anyOf", "oneOf"):
            yield from schema[keyword] if isinstance(schema.get(keyword), list) else ()

    def _required_parts(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        if "$ref" in schema:
            yield self._pointed_to(str(schema["$ref"]))
        yield from schema["allOf"] if isinstance(schema.get("allOf"), list) else ()

    def _pointed_to(self, reference: str) -> Any:
        found: Any = self._root if reference.startswith("#") else None
        for key in unquote(reference[1:]).split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping):
                found = found.get(key)
            elif isinstance(found, Sequence) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                return None
        return found


def _constant(value: Any) -> Alternative:
    types = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (Mapping, "object"))
    name = next((name for kind, name in types if isinstance(value, kind)), "null" if value is None else "array")
    return NULL if value is None else Alternative(name, well_formed(json.dumps(value, ensure_ascii=False)))


def _common(some: Sequence[Alternative], others: Sequence[Alternative]) -> list[Alternative]:
    """Returns what both allow, in the order of the first."""
    same = dict.fromkeys(others)
    types = [other for other in same if other.constant is None]
    both = (
        _both(one, other)
        for one in dict.fromkeys(some)
        for other in (same if one.constant is None else [one] if one in same else types)
    )
    return list(dict.fromkeys(each for each in both if each is not None))


def _both(one: Alternative, other: Alternative) -> Alternative | None:
    if one.constant is not None and other.constant is not None:
        return one if one == other else None
    types = {one.type, other.type} - {"any"}
    if len(types) > 1 and types != {"integer", "number"}:
        return None
    type = "integer" if len(types) > 1 else next(iter(types), "any")
    return Alternative(type, other.constant if one.constant is None else one.constant)


class _Given:
    """Reads an argument's text once as each type.

    Args:
        exact: the text may also be a string, so no spelling is repaired.
    """

    def __init__(self, text: str, *, exact: bool) -> None:
        self._text = text
        self._stripped = text.strip()
        self._exact = exact
        self._values: dict[str, tuple[object, ...]] = {}

    def fit(self, alternative: Alternative) -> str | None:
        """Returns the text as JSON; None: it is no such value."""
        type, constant = alternative.type, alternative.constant
        if constant is None:
            return _fit(type, self._text, exact=self._exact)
        is_quoted = type == "string" and self._stripped == constant
        return constant if is_quoted or json.loads(constant) in self._values_as(type) else None

    def _values_as(self, type: str) -> tuple[object, ...]:
        """Returns the values that the text may have as a constant of this type."""
        if type not in self._values:
            if type == "string":
                self._values[type] = well_formed(self._text), well_formed(self._stripped)
            else:
                found = _fit(type, self._text, exact=False)
                self._values[type] = () if found is None else (json.loads(found),)
        return self._values[type]


def _fit(type: str, text: str, *, exact: bool) -> str | None:
    """Returns the text as JSON of this type; None: it is no such value."""
    stripped = text.strip()
    match type:
        case "string":
            return quoted(text)
        case "null":
            return "null" if stripped.lower() in ("null", "none", "nil") and not exact else None
        case "boolean":
            return WORDS.get(stripped) or (None if exact else WORDS.get(stripped.lower()))
        case "integer" | "number" if exact and not NUMBER.fullmatch(stripped):
            return None
        case "integer":
            return _integer(stripped)
        case "number":
            return number(stripped)
        case "any":
            return literal(stripped, mend=not exact)
    found = literal(stripped, mend=not exact)
    return found if found is not None and found.startswith("{" if type == "object" else "[") else None


def _integer(text: str) -> str | None:
    found = number(text)
    if found is None or INTEGER.fullmatch(found):
        return found
    value = float(found)
    return str(int(value)) if value.is_integer() and abs(value) < INTEGERS_OF_DOUBLES else None


def literal(text: str, *, mend: bool = True) -> str | None:
    """Returns JSON unchanged, or a literal of Python as JSON; None: it is neither. `mend`: repair brackets."""
    found = text if _is_strict(text) else _python(text)
    if found is None:
        return rewritten(text) if mend and text.startswith(("{", "[")) else None
    return rewritten(found) if found.count("{") + found.count("[") > DEPTH_MAX else found


def _is_strict(text: str) -> bool:
    try:
        strict_json(text)
    except (ValueError, RecursionError):
        return False
    return True


def _python(text: str) -> str | None:
    if len(text) > PYTHON_CHARS_MAX:
        return None
    # Python keeps the backslash of an escape that it does not know, and warns.
    text = PYTHON_ESCAPE.sub(lambda it: it[0] if it[1] in PYTHON_ESCAPES else "\\" + it[0], text)
    try:
        value = ast.literal_eval(text)
        return well_formed(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
