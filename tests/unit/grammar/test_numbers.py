"""Numbers in JSON Schemas: outputs obey each bound, multiple and count exactly, or the schema is refused by keyword."""

import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from itertools import chain
from operator import ge, gt, le, lt
from random import Random
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from baton.core.errors import InvalidRequest
from baton.core.types import Grammar, GrammarKind
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.matcher import MaskFiller
from tests.unit.grammar.conftest import EOS, Accepts

BOUNDS: dict[str, Callable[[Fraction, Fraction], bool]] = {
    "minimum": ge,
    "maximum": le,
    "exclusiveMinimum": gt,
    "exclusiveMaximum": lt,
}
REFUSED: list[tuple[str, str]] = [
    ('{"type": "integer", "minimum": 1e20, "maximum": 1.0001e20}', "minimum"),
    ('{"type": "integer", "minimum": 9223372036854775808}', "minimum"),
    ('{"type": "number", "maximum": -1e16}', "maximum"),
    ('{"type": "integer", "exclusiveMinimum": 9007199254740992}', "exclusiveMinimum"),
    ('{"type": "integer", "exclusiveMaximum": -9007199254740992.0}', "exclusiveMaximum"),
    ('{"minimum": 1e400}', "minimum"),
    ('{"minimum": -1e400}', "minimum"),
    ('{"type": "number", "minimum": 1e-300}', "minimum"),
    ('{"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}', "exclusiveMinimum"),
    ('{"type": "number", "exclusiveMinimum": 3.0, "exclusiveMaximum": 3.5}', "exclusiveMinimum"),
    ('{"type": "number", "exclusiveMaximum": -3, "minimum": -3.25}', "exclusiveMaximum"),
    ('{"type": "number", "allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}', "exclusiveMinimum"),
    ('{"const": 1e20}', "const"),
    ('{"type": "integer", "enum": [1, -1e20]}', "enum"),
    ('{"enum": [{"a": [1e400]}]}', "enum"),
    ('{"multipleOf": 0}', "multipleOf"),
    ('{"multipleOf": -2}', "multipleOf"),
    ('{"multipleOf": 1e-10}', "multipleOf"),
    ('{"multipleOf": 5e-324}', "multipleOf"),
    ('{"multipleOf": 1e400}', "multipleOf"),
    ('{"multipleOf": 0.07}', "multipleOf"),
    ('{"multipleOf": 1.000001}', "multipleOf"),
    ('{"multipleOf": 100001}', "multipleOf"),
    ('{"type": "integer", "allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]}', "multipleOf"),
    ('{"$ref": "#/$defs/a", "multipleOf": 1e-9, "$defs": {"a": {"multipleOf": 7}}}', "multipleOf"),
    ('{"type": "number", "exclusiveMinimum": 100, "multipleOf": 65537}', "multipleOf"),
    ('{"minLength": 4294967297}', "minLength"),
    ('{"minItems": 1e18}', "minItems"),
    ('{"minProperties": 1e300}', "minProperties"),
    ('{"minItems": 1e400}', "minItems"),
    ('{"maxLength": -1}', "maxLength"),
    ('{"maxItems": 2.5}', "maxItems"),
    ('{"maxProperties": true}', "maxProperties"),
    ('{"type": "string", "pattern": "a{0,4294967297}"}', "pattern"),
    ('{"type": "string", "pattern": "(a{ 1000 }){ 1000 }"}', "pattern"),
]


@pytest.mark.parametrize(("schema", "keyword"), REFUSED)
def test_a_number_that_cannot_be_honoured_is_refused_by_its_keyword(
    compiler: GrammarCompiler, schema: str, keyword: str
) -> None:
    with pytest.raises(InvalidRequest, match=f'keyword "{keyword}"'):
        compiler.check(Grammar(GrammarKind.JSON_SCHEMA, schema))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ('{"type": "integer", "minimum": 5.0, "maximum": 7e0}', ["5", "7"], ["4", "8"]),
        ('{"type": "integer", "minimum": -0.0, "exclusiveMaximum": 2}', ["0", "1"], ["-1", "2"]),
        ('{"type": "integer", "maximum": 9007199254740992}', ["9007199254740992"], ["9007199254740993"]),
        ('{"type": "integer", "minLength": 3, "maxLength": 4.0}', ["12345"], ['"1"']),
        ('{"type": "string", "minLength": 1.0, "maxLength": 2}', ['"a"', '"aa"'], ['""', '"aaa"']),
        ('{"type": "string", "maxLength": 9223372036854775807}', ['"a"'], ["1"]),
        ('{"type": "array", "items": {"const": 1}, "maxItems": 1e300}', ["[]", "[1,1]"], ["[2]"]),
        ('{"type": "object", "minProperties": 1, "maxProperties": 4294967297}', ['{"a":1}'], ["{}"]),
        ('{"type": "integer", "allOf": [{"multipleOf": 6}, {"multipleOf": 10}]}', ["60", "-30"], ["6", "10"]),
    ],
)
def test_numbers_mean_the_same_however_they_are_written(
    accepts: Accepts, schema: str, good: list[str], bad: list[str]
) -> None:
    assert [each for each in good if not accepts(GrammarKind.JSON_SCHEMA, schema, each)] == []
    assert [each for each in bad if accepts(GrammarKind.JSON_SCHEMA, schema, each)] == []


NUMBERS = (
    *(
        "0",
        "-0.0",
        "1",
        "3",
        "9",
        "10",
        "99",
        "100",
        "-1",
        "-3",
        "-10",
        "5.0",
        "1234567",
        "1e15",
        "1e16",
        "1e18",
        "1e20",
    ),
    *("0.1", "0.3", "0.5", "0.05", "-0.5", "1.5", "-1.5", "3.25", "3.5", "9.99", "99.5", "-99.9", "123.456", "2e-3"),
    *("9007199254740991", "9007199254740992", "-9007199254740993", "9223372036854775807", "1e308", "1e-5", "-1e-7"),
)
MULTIPLES = (
    "1",
    "2",
    "3",
    "7",
    "10",
    "0.5",
    "0.25",
    "0.1",
    "0.01",
    "1.5",
    "2.5",
    "1e-5",
    "1025",
    "4.35",
    "1e-300",
    "1e20",
)


def random_schema(random: Random) -> str:
    chosen = {keyword: random.choice(NUMBERS) for keyword in random.sample(sorted(BOUNDS), random.randint(1, 3))}
    if random.random() < 0.3:
        chosen["multipleOf"] = random.choice(MULTIPLES)
    members = [f'"{keyword}": {value}' for keyword, value in chosen.items()]
    return f'{{"type": "{random.choice(("integer", "number"))}", {", ".join(members)}}}'


def refusal_of(compiler: GrammarCompiler, schema: str) -> InvalidRequest | None:
    try:
        compiler.check(Grammar(GrammarKind.JSON_SCHEMA, schema))
    except InvalidRequest as error:
        return error
    return None


def obeys(schema: dict[str, Any], text: str) -> bool:
    """What jsonschema computes, but exactly."""
    value = Fraction(text)
    if schema["type"] == "integer" and value % 1:
        return False
    if "multipleOf" in schema and value % Fraction(repr(schema["multipleOf"])):
        return False
    return all(holds(value, Fraction(repr(schema[name]))) for name, holds in BOUNDS.items() if name in schema)


def texts_near(schema: dict[str, Any]) -> Iterator[str]:
    for bound in (Decimal(repr(schema[name])) for name in BOUNDS if name in schema):
        for step in ("0", "1", "0.1", "0.5", "1e-9", "1e-20", "9"):
            for number in (bound + Decimal(step), bound - Decimal(step), Decimal(0)):
                text = format(number, "f")
                yield from (text, text + "0") if "." in text else (text, text + ".0", text + ".5")


def drawn(compiler: GrammarCompiler, tokenizer: Tokenizer, schema: str, random: Random) -> str | None:
    """A random output; None: it was too long."""
    matcher = compiler.matcher(Grammar(GrammarKind.JSON_SCHEMA, schema))
    masks = np.empty((1, matcher.words), np.int32)
    output: list[int] = []
    for _ in range(20):
        assert MaskFiller().fill([matcher], masks) == [None]
        allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")).tolist()
        if allowed == [EOS] or (EOS in allowed and random.random() < 0.4):
            return str(tokenizer.decode(output))
        output.append(random.choice([token_id for token_id in allowed if token_id != EOS]))
        matcher.consume(output[-1])
    return None


@pytest.mark.parametrize("seed", range(8))
def test_no_output_of_a_schema_of_numbers_breaks_it(
    compiler: GrammarCompiler, accepts: Accepts, tokenizer: Tokenizer, seed: int
) -> None:
    random = Random(seed)
    honoured = 0
    for _ in range(25):
        text = random_schema(random)
        schema = json.loads(text)
        if (refused := refusal_of(compiler, text)) is not None:
            assert any(f'"{keyword}"' in str(refused) for keyword in schema) or "no output satisfies" in str(refused)
            continue
        honoured += 1
        outputs = (drawn(compiler, tokenizer, text, random) for _ in range(3))
        near = (each for each in texts_near(schema) if accepts(GrammarKind.JSON_SCHEMA, text, each))
        assert [each for each in chain(outputs, near) if each is not None and not obeys(schema, each)] == [], text
    assert honoured > 5
