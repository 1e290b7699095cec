"""Writes grammars in Lark's syntax, and makes the checks that the grammar library does not make."""

import json
import re
from collections.abc import Callable

from baton.grammar.patterns import UnsupportedPattern, check_repetitions, to_rust, without_anchors
from baton.grammar.refusal import refusal
from baton.grammar.schema import parse_json, readable

# NOTE: the library recurses from rule to rule; a chain of 3,000 overflows its stack and ends the process.
MOST_RULES = 500
_MOST_CHOICES = 10_000
_RULE = re.compile(r"^\s*[!?]?[A-Za-z_][\w.-]*\s*(\[[^\]\n]*\]\s*|\{[^}\n]*\}\s*|::[^:\n]*)?(\.\d+)?\s*:", re.MULTILINE)
_ATTRIBUTES = re.compile(r"^\s*[A-Za-z_][\w-]*\s*\[([^\]\n]*)\]\s*:", re.MULTILINE)
_UNUSABLE_ATTRIBUTES = {"temperature": "it cannot change within an output", "stop": "it takes tokens back"}
# What the library reads as one word, inside which operator characters mean themselves. A word without an end takes the
# rest.
_WORD = re.compile(
    r'"(?:\\.|[^"\\])*(?:"|\\?\Z)|(?:\#|//)[^\n]*|/(?:\\.|[^/\\])+(?:/|\\?\Z)|<[^<>\s]+>|(?P<inline>%(?:json|llguidance|regex)\s*)'
    r"|~[ \t]*[+-]?\d|(?P<operator>[&~])",
    re.DOTALL,
)
_INLINE_SCHEMA = re.compile(r"%json\s*")


def literal(text: str) -> str:
    """The text as a string of Lark."""
    return json.dumps(text, ensure_ascii=False)


def one_of(texts: list[str]) -> str:
    """A grammar of exactly these texts."""
    return f"start: CHOICE\nCHOICE: {' | '.join(map(literal, texts))}"


def regex(pattern: str) -> str:
    """An expression of Lark for a regular expression.

    Raises:
        InvalidRequest: the regular expression has something that cannot be honoured.
    """
    try:
        rust = to_rust(without_anchors(pattern))
    except UnsupportedPattern as why:
        raise refusal(f"the regular expression is not supported: {why}", value=pattern) from None
    return "/" + rust.replace("/", "\\/").replace("\n", "\\n") + "/"


def read_choices(text: str) -> list[str]:
    """The texts of a choice, from JSON.

    Raises:
        InvalidRequest: it is not an array of texts, or has too many.
    """
    choices = parse_json(text, what="choice")
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) and each for each in choices):
        raise refusal("the choice is not an array of texts", value=text, allowed=("a JSON array of non-empty strings",))
    if len(choices) > _MOST_CHOICES:
        raise refusal(f"the choice has {len(choices)} texts", value=len(choices), allowed=(f"at most {_MOST_CHOICES}",))
    return choices


def readable_lark(text: str) -> str:
    """The grammar with each inline schema checked as `baton.grammar.schema` does.

    Raises:
        InvalidRequest: it asks for something that cannot be honoured; names the line.
    """
    if (number := len(_RULE.findall(text))) > MOST_RULES:
        raise refusal(f"the grammar has {number} rules", value=number, allowed=(f"at most {MOST_RULES}",))
    try:
        check_repetitions(text)
    except UnsupportedPattern as error:
        raise refusal(f"the grammar is too large: {error}") from None
    _check_operators(text)
    for rule in _ATTRIBUTES.finditer(text):
        for attribute, why in _UNUSABLE_ATTRIBUTES.items():
            if re.search(rf"\b{attribute}\s*=", rule[1]):
                line = text.count("\n", 0, rule.start(1)) + 1
                raise refusal(
                    f'line {line} of the grammar has the attribute "{attribute}", which is not supported: {why}',
                    value=rule[0].strip(),
                    allowed=("lazy", "suffix", "capture"),
                )
    return _with_schemas(text, readable)


def _check_operators(text: str) -> None:
    """Refuses intersections and complements of expressions: the library searches all of their states for a text that
    they match, and cannot be interrupted: `~/(.*a.{30}.*)/ & ~/(.*b.{30}.*)/ & /[abc]{100}/` takes minutes."""
    decoder = json.JSONDecoder()
    place = 0
    while word := _WORD.search(text, place):
        place = word.end()
        if word["inline"]:
            try:
                _, place = decoder.raw_decode(text, place)
            except (ValueError, RecursionError):
                continue  # the library refuses it
        elif operator := word["operator"]:
            line = text.count("\n", 0, word.start()) + 1
            what = "an intersection" if operator == "&" else "a complement"
            raise refusal(
                f"line {line} of the grammar has {what}, which is not supported: its cost has no bound",
                value=operator,
                cure="write one regular expression of the texts that match",
            )


def _with_schemas(text: str, read: Callable[[object], str]) -> str:
    pieces, end = [], 0
    decoder = json.JSONDecoder()
    for place in _INLINE_SCHEMA.finditer(text):
        if place.start() < end:
            continue
        try:
            schema, stop = decoder.raw_decode(text, place.end())
        except (ValueError, RecursionError):
            continue  # a part of a string or of a comment; otherwise the grammar library refuses it
        pieces += [text[end : place.start()], "%json ", read(schema)]
        end = stop
    return "".join([*pieces, text[end:]])
