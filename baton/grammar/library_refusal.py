"""Makes errors for clients of the grammar library's messages about a grammar that it refuses. Pure."""

import re

from baton.core.errors import InvalidRequest
from baton.core.types import Grammar, GrammarKind
from baton.grammar.refusal import refusal

# Parts of the grammar library's messages, and the keyword that each is about.
_KEYWORDS_OF_MESSAGES = (
    ("oneOf", "oneOf"),
    ("patternProperty", "patternProperties"),
    ("multipleOf", "multipleOf"),
    ("format", "format"),
    ("Anchor", "$ref"),
    ("Resource", "$ref"),
    ("circular ref", "$ref"),
    ("minLength", "minLength"),
    ("minItems", "minItems"),
    ("Properties", "minProperties"),
    ("required", "required"),
    ("regex", "pattern"),
    ("fuel", "multipleOf"),
    ("fuel", "pattern"),
)
_REGEX_HEAD = "regex parse error:"
_REGEX_MISTAKE = re.compile(r"^error: (.+)$", re.MULTILINE)
_PLACE = re.compile(r"^(?:at )?(\d+)\(\d+\): ")


def library_refusal(grammar: Grammar, message: str) -> InvalidRequest:
    """The error for a grammar that the grammar library refuses with this message."""
    first = message.splitlines()[0][:300] if message else "unknown reason"
    line = _PLACE.match(first)
    why = first[line.end() :] if line else first
    if why.endswith(_REGEX_HEAD) and (mistake := _REGEX_MISTAKE.search(message)):  # its first line only names the regex
        why = f"{why.removesuffix(_REGEX_HEAD).removesuffix(' (in regex): ')}: {mistake[1][:300]}".removeprefix(": ")
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        why = why.removeprefix("failed to compile JSON schema: ").removeprefix(": ")
        named = (name for part, name in _KEYWORDS_OF_MESSAGES if part in why and f'"{name}"' in grammar.text)
        keyword = next(named, "")
        if "oneOf constraints" in why:
            about = 'the JSON Schema keyword "oneOf" has alternatives that may overlap'
            return refusal(about, value="oneOf", cure='give each its own type or constant, or use "anyOf"')
        if why.startswith("Unsatisfiable"):
            return refusal(f"no output satisfies the JSON Schema: {why}", value=keyword or grammar.text)
        about = (
            f'the JSON Schema keyword "{keyword}" cannot be honoured here' if keyword else "the JSON Schema is refused"
        )
        return refusal(f"{about}: {why}", value=keyword or grammar.text)
    if grammar.kind is GrammarKind.LARK and line:
        return refusal(f"line {line[1]} of the grammar is wrong: {why}", value=grammar.text)
    return refusal(f"the {grammar.kind.value.replace('_', ' ')} is wrong: {why}", value=grammar.text)
