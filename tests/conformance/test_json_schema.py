"""The JSON-Schema-Test-Suite: no instance that a schema forbids is accepted, and each schema is honoured or refused.

The suite is that of https://github.com/json-schema-org/JSON-Schema-Test-Suite, draft 2020-12, required keywords; see
suite/LICENSE in `tests/conformance/json_schema`.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tokenizers import Tokenizer

from baton.core.errors import InvalidRequest
from baton.core.types import Grammar, GrammarKind
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.schema import FORMATS
from baton.settings.config import DEMO_MODELS, tokenizer_file

SUITE = Path(__file__).parent / "json_schema" / "suite" / "draft2020-12"
TOKENIZER = tokenizer_file(DEMO_MODELS / "llama")


class Case(NamedTuple):
    """One schema of the suite and its instances."""

    file: str
    description: str
    schema: Any
    tests: list[dict[str, Any]]


def cases() -> Iterator[Case]:
    for path in sorted(SUITE.glob("*.json")):
        for case in json.loads(path.read_text(encoding="utf-8")):
            yield Case(path.stem, case["description"], case["schema"], case["tests"])


# Valid instances that are not accepted: outputs are held to more than the standard asks.
STRICTER = {
    # Properties come in the order of the schema, which `allOf` and `const` have too.
    ("allOf", "allOf", "allOf"),
    ("allOf", "allOf with base schema", "valid"),
    ("const", "const with object", "same object with different property order is valid"),
    # An integer has no fraction, not even one of 0.
    ("const", "const with 0 does not match other zero-like types", "float zero is valid"),
    ("const", "const with 1 does not match true", "float one is valid"),
    ("const", "const with -2.0 matches integer and float types", "float -2.0 is valid"),
    ("const", "float and integers are equal up to 64-bit representation limits", "float is valid"),
    ("enum", "enum with 0 does not match false", "float zero is valid"),
    ("enum", "enum with 1 does not match true", "float one is valid"),
    ("enum", "enum with [0] does not match [false]", "[0.0] is valid"),
    ("enum", "enum with [1] does not match [true]", "[1.0] is valid"),
    ("type", "integer type matches integers", "a float with zero fractional part is an integer"),
    # A format is checked, although the standard makes it an annotation.
    *(("format", f"{name} format", f"invalid {name} string is only an annotation by default") for name in FORMATS),
}
NAMED = re.compile(r'JSON Schema(?: keyword|\'s) "([^"]+)"')


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, 4096, (4095,))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER))


def accepts(compiler: GrammarCompiler, tokenizer: Tokenizer, schema: str, instance: Any) -> bool:
    matcher = compiler.matcher(Grammar(GrammarKind.JSON_SCHEMA, schema))
    text = json.dumps(instance, ensure_ascii=False, separators=(",", ":"))
    try:
        for token_id in tokenizer.encode(text, add_special_tokens=False).ids:
            matcher.consume(token_id)
    except InvalidRequest:
        return False
    return matcher.is_accepting


def refusal_of(compiler: GrammarCompiler, case: Case) -> InvalidRequest | None:
    try:
        compiler.check(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(case.schema)))
    except InvalidRequest as error:
        return error
    return None


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: f"{case.file}: {case.description}")
def test_a_schema_is_honoured_or_refused_by_the_name_of_its_keyword(
    compiler: GrammarCompiler, tokenizer: Tokenizer, case: Case
) -> None:
    schema = json.dumps(case.schema)
    refused = refusal_of(compiler, case)
    if refused is None:
        for test in case.tests:
            stricter = (case.file, case.description, test["description"]) in STRICTER
            accepted = accepts(compiler, tokenizer, schema, test["data"])
            assert accepted == (test["valid"] and not stricter), test["description"]
    elif named := NAMED.search(str(refused)):
        assert refused.field == "grammar"
        assert f'"{named[1]}"' in schema
    else:
        assert "no output satisfies" in str(refused)
        assert not any(test["valid"] for test in case.tests)


def test_no_schema_is_refused_that_was_honoured_before(compiler: GrammarCompiler) -> None:
    assert sum(refusal_of(compiler, case) is None for case in cases()) == 172
