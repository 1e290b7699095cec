"""What each kind of grammar accepts and refuses, and what compiling may cost."""

import json
import subprocess
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from baton.core.errors import InvalidRequest
from baton.core.types import Grammar, GrammarKind
from baton.grammar import compiler as module
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.lark import readable_lark
from baton.grammar.limits import MOST_BYTES
from baton.grammar.matcher import MaskFiller
from tests.unit.grammar.conftest import EOS, TOKENIZER, VOCAB_SIZE, Accepts

NESTED = 'root ::= expr\nexpr ::= term ("+" term)*\nterm ::= [0-9]+ | "(" expr ")"\n'
NUMBERS = 'root ::= "a" num | "\\u00e9" "\\x41"\nnum ::= [0-9]+ ("." [0-9]+)?'
CHOICES = '["yes", "no way \\"x\\" é", "a\\\\nb"]'
ACCEPTED: list[tuple[GrammarKind, str, list[str], list[str]]] = [
    (GrammarKind.JSON_OBJECT, "", ['{"a":[1,2,{"b":null}]}', "{}", '{\n  "a": 1\n}'], ["[]", "1", "{", '{"a":1}\n']),
    (GrammarKind.JSON_SCHEMA, '{"type": "integer", "x-guidance": {"lenient": true}}', ["12", "-3"], ["1.5", '"1"']),
    (GrammarKind.JSON_SCHEMA, "true", ["1", "[]"], ["["]),
    (GrammarKind.REGEX, r"^[a-z]+\d{2}$", ["ab12"], ["12", "ab1", "ab12x"]),
    (GrammarKind.REGEX, r"a.c\$", ["abc$"], ["a\nc$", "a\rc$"]),
    (
        GrammarKind.CHOICE,
        '["yes", "no way \\"x\\" é", "a\\\\nb"]',
        ["yes", 'no way "x" é', "a\\nb"],
        ["y", "no way", "a\nb"],
    ),
    (GrammarKind.LARK, 'start: "a" B\nB: /[0-9]+/', ["a12"], ["a", "a1b"]),
    (GrammarKind.LARK, 'start: "x" %json {"type": "integer"}', ["x12"], ['x"a"']),
    (
        GrammarKind.GBNF,
        'root ::= "a" num | "\\u00e9" "\\x41"\nnum ::= [0-9]+ ("." [0-9]+)?',
        ["a12.5", "éA"],
        ["a", "é"],
    ),
    (GrammarKind.GBNF, NESTED, ["1+(2+3)"], ["(1", "+"]),
    (GrammarKind.GBNF, 'root ::= word "abc"\nword ::= [a-z]*\n', ["defabc"], ["ab"]),
]


@pytest.mark.parametrize(("kind", "text", "good", "bad"), ACCEPTED)
def test_outputs_are_accepted_as_the_grammar_says(
    accepts: Accepts, kind: GrammarKind, text: str, good: list[str], bad: list[str]
) -> None:
    assert [each for each in good if not accepts(kind, text, each)] == []
    assert [each for each in bad if accepts(kind, text, each)] == []


REFUSED = [
    (GrammarKind.REGEX, "(?=a)b", "looks ahead"),
    (GrammarKind.REGEX, "(a", r'the regex is wrong: invalid regex "\(a": unclosed group'),
    (GrammarKind.REGEX, "[[a]", "character class"),
    (GrammarKind.REGEX, r"(a)\1", r"escape \\1"),
    (GrammarKind.REGEX, "(a{1000}){1000}", "repetitions"),
    (GrammarKind.REGEX, "a\\", "backslash"),
    (GrammarKind.CHOICE, "[]", "non-empty strings"),
    (GrammarKind.CHOICE, '[""]', "non-empty strings"),
    (GrammarKind.CHOICE, '["a", 1]', "non-empty strings"),
    (GrammarKind.CHOICE, '{"a"', "not JSON"),
    (GrammarKind.LARK, "start: x\nx: b", r'line 2 of the grammar is wrong: unknown name: "b"'),
    (GrammarKind.LARK, 'start: "a', "line 1"),
    (GrammarKind.LARK, 'start: %json {"not": {}}', '"not"'),
    (GrammarKind.LARK, 'start: x\nx[temperature=0.5]: "a"', 'line 2 of the grammar has the attribute "temperature"'),
    (GrammarKind.LARK, 'start: x "b"\nx[stop="b"]: /.*/', '"stop"'),
    (GrammarKind.LARK, "start: <|nope|>", "special token"),
    (GrammarKind.LARK, "start: " + "(" * 20000 + '"a"' + ")" * 20000, "deeply nested"),
    (GrammarKind.LARK, "\n".join(f'r{i}: "x" r{i + 1}' for i in range(3000)), "3000 rules"),
    (GrammarKind.LARK, 'start: x{1000000000}\nx: "a"', "repetitions"),
    (GrammarKind.GBNF, 'root ::= "a" nope', "nope"),
    (GrammarKind.GBNF, 'root ::= "a', "line 1"),
    (GrammarKind.GBNF, 'x ::= "a"', "root"),
    (GrammarKind.GBNF, 'root = "a"', "line 1 of the grammar is not GBNF"),
    (GrammarKind.GBNF, "root ::= " + "(" * 20000 + '"a"' + ")" * 20000, "nested"),
    (GrammarKind.GBNF, "root ::= root", "no output can follow the grammar: the grammar allows nothing here"),
    (GrammarKind.REGEX, r"[^\s\S]", "allows nothing here"),
    (GrammarKind.JSON_SCHEMA, '{"$ref": "#"}', "allows nothing here"),
    (
        GrammarKind.JSON_SCHEMA,
        '{"oneOf": [{"type": "integer"}, {"type": "number"}]}',
        '"oneOf" .* may overlap; .*"anyOf"',
    ),
    (GrammarKind.JSON_SCHEMA, '{"pattern": "^a{$", "type": "string"}', "is refused: repetition quantifier"),
    (GrammarKind.JSON_SCHEMA, "[" * 100_000, "JSON"),
    (GrammarKind.JSON_SCHEMA, '{"description": "' + "a" * MOST_BYTES + '"}', "bytes"),
]


@pytest.mark.parametrize(("kind", "text", "named"), REFUSED, ids=range(len(REFUSED)))
def test_a_grammar_that_cannot_be_followed_is_refused_by_name(
    compiler: GrammarCompiler, kind: GrammarKind, text: str, named: str
) -> None:
    with pytest.raises(InvalidRequest, match=named) as refused:
        compiler.check(Grammar(kind, text))
    assert refused.value.field == "grammar"
    assert len(str(refused.value)) < 2000


def test_a_model_without_a_tokenizer_refuses_every_grammar(tmp_path: Path) -> None:
    compiler = GrammarCompiler(tmp_path / "tokenizer.json", VOCAB_SIZE, (EOS,))
    for ask in (compiler.check, compiler.matcher, compiler.prepare):
        with pytest.raises(InvalidRequest, match=r"tokenizer\.json"):
            ask(Grammar(GrammarKind.JSON_OBJECT))


def test_a_model_without_an_end_of_sequence_refuses_every_grammar() -> None:
    with pytest.raises(InvalidRequest, match="no token that ends a sequence"):
        GrammarCompiler(TOKENIZER, VOCAB_SIZE, ()).check(Grammar(GrammarKind.JSON_OBJECT))


def test_a_grammar_is_compiled_once_for_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []
    library = LLMatcher

    class Counting:
        def __new__(cls, *given: Any, **named: Any) -> Any:
            compiled.append(given)
            return library(*given, **named)

    monkeypatch.setattr(module, "LLMatcher", Counting)
    compiler = GrammarCompiler(TOKENIZER, VOCAB_SIZE, (EOS,))
    grammar = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "integer"}')
    compiler.prepare(grammar)
    threads = [Thread(target=compiler.check, args=(grammar,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    compiler.matcher(grammar)
    assert len(compiled) == 1


def test_the_latest_grammars_are_kept_and_others_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CACHED_GRAMMARS", 3)
    compiler = GrammarCompiler(TOKENIZER, VOCAB_SIZE, (EOS,))
    first = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"const": 0}))
    compiler.check(first)
    for number in range(1, 10):
        compiler.check(Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"const": number})))
        compiler.check(first)
    assert len(compiler._compiled) == 3
    assert first in compiler._compiled


def test_a_refused_grammar_is_not_kept(compiler: GrammarCompiler) -> None:
    wrong = Grammar(GrammarKind.REGEX, "(wrong")
    for _ in range(2):
        with pytest.raises(InvalidRequest):
            compiler.check(wrong)
    assert wrong not in compiler._compiled


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GrammarKind.LARK, "start: P Q\nP: /a+/\nQ: /a+/"),
        (GrammarKind.LARK, '%llguidance {"no_forcing": false}\nstart: P P\nP: /a+/ # no end of line'),
        (
            GrammarKind.STRUCTURAL_TAG,
            '{"type": "structural_tag", "format": {"type": "sequence", "elements": '
            '[{"type": "regex", "pattern": "a+"}, {"type": "regex", "pattern": "a+"}]}}',
        ),
    ],
)
def test_a_grammar_that_forces_one_character_for_ever_is_followed_in_bounded_time(kind: GrammarKind, text: str) -> None:
    program = "import sys; from tests.unit.grammar.test_compiler import follow_three; follow_three(*sys.argv[1:])"
    bounded = f'ulimit -t 30; exec {sys.executable} -c "$0" "$@"'
    assert subprocess.run(["bash", "-c", bounded, program, kind.value, text], check=False).returncode == 0


def follow_three(kind: str, text: str) -> None:
    """Runs in a process that the kernel ends after a bound of CPU time: nothing else interrupts the library."""
    matcher = GrammarCompiler(TOKENIZER, VOCAB_SIZE, (EOS,)).matcher(Grammar(GrammarKind(kind), text))
    a = Tokenizer.from_file(str(TOKENIZER)).encode("a", add_special_tokens=False).ids[0]
    for _ in range(3):
        assert MaskFiller().fill([matcher], np.empty((1, matcher.words), np.int32)) == [None]
        matcher.consume(a)


def test_a_lark_grammar_in_the_librarys_own_json_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="JSON, not Lark"):
        GrammarCompiler(TOKENIZER, VOCAB_SIZE, (EOS,)).check(Grammar(GrammarKind.LARK, ' {"grammars": []}'))


@pytest.mark.parametrize(
    ("text", "operator"),
    [
        ("start: A\nA: ~/(.*a.{30}.*)/ & ~/(.*b.{30}.*)/ & /[abc]{100}/", "line 2 of the grammar has a complement"),
        ("start: A\nA: /(.*a.{30}.*)/ & /[abc]{100}/", "line 2 of the grammar has an intersection"),
        ('start: A // a comment with "\nA: /a/ & /b/', "line 2 of the grammar has an intersection"),
        ('start: /"/ A # it\'s "\nA: "/" & ~ /b\\//', "line 2 of the grammar has an intersection"),
        ('start: %json {"const": "\\""} A\nA: ~/b/', "line 2 of the grammar has a complement"),
        ('start: %regex {"substring_chars": "\\"&"} A\nA: ~/b/', "line 2 of the grammar has a complement"),
    ],
)
def test_intersections_and_complements_of_expressions_are_refused_uncompiled(text: str, operator: str) -> None:
    with pytest.raises(InvalidRequest, match=operator):
        readable_lark(text)


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ('start: "a & ~b" // & ~', "a & ~b"),
        ("start: /a & ~b/ # & ~", "a & ~b"),
        ('start: %json {"const": "&~"}', '"&~"'),
        ('start: "a" ~ 2 "b"~1..2', "aab"),
    ],
)
def test_marks_that_are_no_operators_between_expressions_are_kept(accepts: Accepts, text: str, output: str) -> None:
    assert accepts(GrammarKind.LARK, text, output)


@pytest.mark.parametrize("text", ["'[' * 99_000", "'start: \"' + '\\\\\"' * 99_000"])
def test_a_text_without_ends_is_read_in_bounded_time(text: str) -> None:
    program = f"from baton.grammar.lark import readable_lark; readable_lark({text})"
    bounded = f'ulimit -t 10; exec {sys.executable} -c "$0"'
    assert subprocess.run(["bash", "-c", bounded, program], check=False).returncode == 0
