"""Checks that JSON Schemas have only keywords that can be honoured. Any other keyword is refused by name.

The rules are those of draft 2020-12. Unknown keywords are annotations, as the standard says. Schemas of earlier drafts
are read by the same rules, which accept nothing that those drafts refuse.
"""

import json
from typing import Any
from urllib.parse import unquote

from baton.core.errors import InvalidRequest
from baton.grammar.numbers import Multiples, NumberBounds, check_exact, readable_count
from baton.grammar.patterns import UnsupportedPattern, to_rust
from baton.grammar.refusal import refusal, wrong_keyword

SUPPORTED = (
    *("$ref", "$defs", "$anchor", "anyOf", "oneOf", "allOf", "const", "enum", "type"),
    *("items", "prefixItems", "minItems", "maxItems"),
    *("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"),
    *("pattern", "format", "minLength", "maxLength"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
)
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")

# Keywords of some draft that cannot be honoured, each with the value that has no effect.
REFUSED: dict[str, object] = {
    "not": None,
    "if": None,
    "then": None,
    "else": None,
    "contains": None,
    "minContains": None,
    "maxContains": None,
    "uniqueItems": False,
    "propertyNames": True,
    "dependentRequired": {},
    "dependentSchemas": {},
    "dependencies": {},
    "unevaluatedItems": True,
    "unevaluatedProperties": True,
    "additionalItems": True,
    "$dynamicRef": None,
    "$dynamicAnchor": None,
    "$recursiveRef": None,
    "$recursiveAnchor": False,
    "$vocabulary": None,
}
# These have no effect without the keyword that they belong to.
_DEPENDENT = {"then": ("if",), "else": ("if",), "if": ("then", "else"), "minContains": ("contains",)}
_DEPENDENT["maxContains"] = ("contains",)
_COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength")
# A number must satisfy several schemas at once where one of the first appears, or one of the others next to another
# keyword.
_COMBINING = {"allOf", "patternProperties"}
_COMBINING_WITH_OTHERS = {"anyOf", "oneOf", "$ref"}
_ALONE = {"$defs", "$anchor", "type"}
_DRAFTS = ("draft/2020-12", "draft/2019-09", "draft-07", "draft-06")
# Between the parts of a JSON text: a space, or a new line with its indentation. Models get lost in endless whitespace.
_OPTIONS = {"whitespace_pattern": r" |\r?\n[ \t]{0,32}", "lenient": False, "coerce_one_of": False}
_MOST_NESTED = 64
_MOST_REFS = 1000
# Each optional property takes 4 of the 2,000 items of a row: with one more, no output gets past its first token.
_MOST_OPTIONAL = 500
_MOST_PROPERTIES = 3000


def parse_json(text: str, *, what: str) -> Any:
    """The value of a text of JSON.

    Raises:
        InvalidRequest: the text is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise _nested(what) from None
    except ValueError as error:
        raise refusal(f"the {what} is not JSON: {error}", value=text) from None


def readable_schema(text: str) -> str:
    """The schema as JSON, in a form that the grammar library reads as the standard says.

    Raises:
        InvalidRequest: it is no JSON Schema, or has a keyword that cannot be honoured; names the keyword and its place.
    """
    return readable(parse_json(text, what="JSON Schema"))


def readable(schema: Any) -> str:
    """Does what `readable_schema` does for a parsed schema, and changes it."""
    if not isinstance(schema, dict | bool):
        raise refusal("a JSON Schema is an object or a boolean", value=json.dumps(schema))
    if schema is False:
        raise refusal("the JSON Schema is false, which no output satisfies", value="false")
    if schema is True:
        schema = {}
    _Reader(schema).read_whole()
    # Options of the grammar library, which a request must not set itself.
    schema["x-guidance"] = _OPTIONS
    return json.dumps(schema, ensure_ascii=False)


class _Reader:
    """Checks one schema and rewrites it in place."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._seen: set[int] = set()
        self._refs = 0
        self._nested_id = ""
        self._properties = 0
        self._bounds = NumberBounds()
        self._multiples = Multiples()
        self._combines = False

    def read_whole(self) -> None:
        """Reads the schema from its root."""
        self.read(self._root, "", 0)
        if self._combines:
            self._bounds.check_together()
            self._multiples.check_together()

    def read(self, schema: Any, place: str, depth: int) -> None:
        """Reads the schema at `place`, a JSON pointer, and all schemas within it."""
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise wrong_keyword(place.rpartition("/")[2] or "schema", place, schema, ("an object", "a boolean"))
        if depth > _MOST_NESTED:
            raise refusal(
                "the JSON Schema is nested too deeply", value=place, allowed=(f"at most {_MOST_NESTED} levels",)
            )
        if id(schema) in self._seen:
            return
        self._seen.add(id(schema))
        self._identity(schema, place)
        self._refuse_keywords(schema, place)
        self._combines = self._combines or _combines(schema)
        self._check_values(schema, place)
        for keyword in ("items", "additionalProperties"):
            if keyword in schema:
                self.read(schema[keyword], f"{place}/{keyword}", depth + 1)
        for keyword in ("prefixItems", "anyOf", "oneOf", "allOf"):
            for index, each in enumerate(_list(schema, keyword, place)):
                self.read(each, f"{place}/{keyword}/{index}", depth + 1)
        self._count_properties(schema, place)
        for keyword in ("properties", "patternProperties", "$defs", "definitions"):
            for name, each in _map(schema, keyword, place).items():
                self.read(each, f"{place}/{keyword}/{_escaped(name)}", depth + 1)
        if "patternProperties" in schema:
            named = schema["patternProperties"].items()
            schema["patternProperties"] = {_pattern(name, "patternProperties", place): each for name, each in named}
        if "$ref" in schema:
            self._follow(schema["$ref"], place, depth)

    def _identity(self, schema: dict[str, Any], place: str) -> None:
        draft = schema.pop("$schema", "")
        if draft and not any(each in str(draft) for each in _DRAFTS):
            raise refusal(f'the JSON Schema\'s "$schema" is {draft!r}', value=draft, allowed=_DRAFTS)
        identity = schema.pop("$id", "")
        if place and isinstance(identity, str) and not identity.startswith("#"):
            self._nested_id = self._nested_id or identity
        self._refuse_moved_refs()

    def _refuse_moved_refs(self) -> None:
        if self._nested_id and self._refs:
            raise refusal(
                'the JSON Schema keyword "$ref" is not supported next to a nested "$id", which changes its meaning',
                value=self._nested_id,
                cure='remove the "$id"',
            )

    def _refuse_keywords(self, schema: dict[str, Any], place: str) -> None:
        for keyword in [keyword for keyword in schema if keyword in REFUSED]:
            needed = _DEPENDENT.get(keyword, ())
            inert = REFUSED[keyword] is not None and schema[keyword] == REFUSED[keyword]
            if inert or (needed and not any(each in schema for each in needed)):
                del schema[keyword]
                continue
            raise refusal(
                f'the JSON Schema keyword "{keyword}" at {place or "the root"} is not supported',
                value=keyword,
                allowed=SUPPORTED,
            )

    def _check_values(self, schema: dict[str, Any], place: str) -> None:
        for keyword in [keyword for keyword in _COUNTS if keyword in schema]:
            if (count := readable_count(schema.pop(keyword), keyword, place)) is not None:
                schema[keyword] = count
        self._bounds.add(schema, place)
        if "multipleOf" in schema:
            self._multiples.add(schema["multipleOf"], place)
        for keyword in schema.keys() & {"const", "enum"}:
            check_exact(schema[keyword], keyword, place)
        if "enum" in schema and not (isinstance(schema["enum"], list) and schema["enum"]):
            raise wrong_keyword("enum", place, schema["enum"], ("an array of at least 1 value",))
        self._check_texts(schema, place)
        least, required = schema.get("minProperties", 0), schema.get("required", ())
        if least > max(1, len(set(required))):
            # The grammar library may repeat a key of `additionalProperties`, and repeated keys count once.
            raise refusal(
                f'the JSON Schema keyword "minProperties" at {place or "the root"} is {least}',
                value="minProperties",
                allowed=("0", "1", 'the number of names in "required"'),
            )

    def _count_properties(self, schema: dict[str, Any], place: str) -> None:
        names = _map(schema, "properties", place).keys()
        self._properties += len(names)
        optional = len(names - set(schema.get("required", ())))
        if optional > _MOST_OPTIONAL or self._properties > _MOST_PROPERTIES:
            raise refusal(
                f'the JSON Schema keyword "properties" at {place or "the root"} has too many names',
                value=self._properties,
                allowed=(f"up to {_MOST_OPTIONAL} optional names", f"up to {_MOST_PROPERTIES} names in all"),
            )

    def _check_texts(self, schema: dict[str, Any], place: str) -> None:
        types = schema.get("type", [])
        types = types if isinstance(types, list) else [types]
        if unknown := [each for each in types if each not in TYPES]:
            raise wrong_keyword("type", place, unknown[0], TYPES)
        if "type" in schema and not types:
            raise wrong_keyword("type", place, "[]", TYPES)
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise wrong_keyword("required", place, required, ("an array of names",))
        if "format" in schema and schema["format"] not in FORMATS:
            raise wrong_keyword("format", place, schema["format"], FORMATS)
        if "pattern" in schema:
            schema["pattern"] = _pattern(schema["pattern"], "pattern", place)

    def _follow(self, ref: Any, place: str, depth: int) -> None:
        self._refs += 1
        if not isinstance(ref, str) or not ref.startswith("#"):
            raise wrong_keyword("$ref", place, ref, ("a reference into the same schema, such as #/$defs/name",))
        if self._refs > _MOST_REFS:
            raise refusal(f'the JSON Schema has more than {_MOST_REFS} "$ref"', value="$ref")
        self._refuse_moved_refs()
        pointer = unquote(ref[1:])
        if pointer and not pointer.startswith("/"):
            return  # an anchor: the grammar library finds it or refuses it
        target = self._root
        for step in pointer.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            try:
                target = target[int(name) if isinstance(target, list) else name]
            except (KeyError, IndexError, ValueError, TypeError):
                raise wrong_keyword("$ref", place, ref, ("a place of the same schema",)) from None
        self.read(target, pointer, depth + 1)


def _combines(schema: dict[str, Any]) -> bool:
    combining = schema.keys() & _COMBINING_WITH_OTHERS
    others = schema.keys() & set(SUPPORTED) - _ALONE
    return bool(schema.keys() & _COMBINING) or (bool(combining) and len(others) > 1)


def _pattern(pattern: Any, keyword: str, place: str) -> str:
    if not isinstance(pattern, str):
        raise wrong_keyword(keyword, place, pattern, ("a regular expression",))
    try:
        return to_rust(pattern)
    except UnsupportedPattern as why:
        raise refusal(
            f'the JSON Schema keyword "{keyword}" at {place or "the root"} is not supported with {pattern!r}: {why}',
            value=pattern,
        ) from None


def _list(schema: dict[str, Any], keyword: str, place: str) -> list[Any]:
    value = schema.get(keyword, [])
    if not isinstance(value, list) or (keyword in schema and not value):
        raise wrong_keyword(keyword, place, value, ("an array of at least 1 schema",))
    return value


def _map(schema: dict[str, Any], keyword: str, place: str) -> dict[str, Any]:
    value = schema.get(keyword, {})
    if not isinstance(value, dict):
        raise wrong_keyword(keyword, place, value, ("an object of schemas",))
    return value


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _nested(what: str) -> InvalidRequest:
    return refusal(f"the {what} is nested too deeply", allowed=(f"at most {_MOST_NESTED} levels",))


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
