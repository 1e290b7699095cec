"""Requests whose grammars become too expensive end with a typed error and do not slow their neighbours."""

import json
import threading
from dataclasses import replace

import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from baton.core.errors import InvalidRequest
from baton.core.sampling import ResolvedSampling
from baton.core.types import FinishReason, Grammar, GrammarKind
from baton.engine.build import BuiltRunner
from baton.settings.config import DEMO_MODELS, tokenizer_file
from tests.unit.engine.tiny import EventRecorder, build, request, running

PROMPT = tuple(range(40, 60))


def nested_tags(depth: int) -> object:
    """Tags of tags of letters, without any text between them: each text can be cut in many ways."""
    if not depth:
        return {"type": "regex", "pattern": "[a-z]"}
    tag = {"begin": "", "end": "", "content": nested_tags(depth - 1)}
    return {"type": "tags_with_separator", "separator": "", "tags": [tag]}


# Their rows grow with the output.
AMBIGUOUS = {
    "sums": Grammar(GrammarKind.LARK, 'start: e\ne: e "+" e | e "*" e | e e | /[a-z0-9 ]/'),
    "pairs": Grammar(GrammarKind.GBNF, "root ::= s\ns ::= s s | [a-z ]"),
    "triples": Grammar(GrammarKind.LARK, "start: s\ns: s s s | s s | /[a-z]/"),
    "right recursion": Grammar(GrammarKind.LARK, "start: r\nr: /[a-z ]/ r | /[a-z ]/"),
    "empty rules": Grammar(GrammarKind.LARK, "start: x\nx: y y y y y y y y\ny: x? /[a-z]/?"),
    "nested repetitions": Grammar(GrammarKind.LARK, "start: a+\na: b+\nb: c+\nc: /[a-z]/"),
    "repeated pairs": Grammar(GrammarKind.LARK, 'start: (b "\\n")*\nb: s{1,12}\ns: s s | /[a-z]/'),
    "tags": Grammar(
        GrammarKind.STRUCTURAL_TAG, json.dumps({"type": "structural_tag", "format": nested_tags(3)}, sort_keys=True)
    ),
}
# The bound is one of CPU time, and masks cost more with each token: a fast machine gets further, to 101 tokens of
# "right recursion" in one run.
TOKENS, NEIGHBOUR_TOKENS = 400, 60


def endless(grammar: Grammar, *, max_tokens: int = TOKENS) -> ResolvedSampling:
    return ResolvedSampling(max_tokens=max_tokens, temperature=1.0, seed=3, grammar=grammar, ignore_eos=True)


@pytest.fixture(scope="module")
def demo() -> BuiltRunner:
    return build(DEMO_MODELS / "llama", num_blocks=512, block_size=16)


def assert_too_expensive(events: EventRecorder, name: str) -> None:
    error = events.errors[name]
    assert isinstance(error, InvalidRequest)
    assert error.field == "grammar"
    assert "too complex to be followed" in error.message or "too expensive to follow" in error.message
    assert "left recursion" in error.cure


@pytest.mark.slow
async def test_an_ambiguous_grammar_ends_its_own_request_and_no_other(demo: BuiltRunner) -> None:
    neighbours = {
        "free": ResolvedSampling(max_tokens=NEIGHBOUR_TOKENS, temperature=1.0, seed=1, ignore_eos=True),
        "bound": endless(Grammar(GrammarKind.REGEX, "[a-z ]{2000}"), max_tokens=NEIGHBOUR_TOKENS),
    }
    alone = {}
    for name, params in neighbours.items():
        async with running(demo) as (engine, events):
            engine.submit(request(name, PROMPT, params))
            await events.finished(name)
            alone[name] = events.ids(name)
    async with running(demo) as (engine, events):
        for name, params in {**neighbours, **{name: endless(grammar) for name, grammar in AMBIGUOUS.items()}}.items():
            engine.submit(request(name, PROMPT, params))
        await events.finished(*neighbours, *AMBIGUOUS)
    for name in AMBIGUOUS:
        assert_too_expensive(events, name)
        assert len(events.ids(name)) < TOKENS / 2
    for name, ids in alone.items():
        assert events.reasons[name] is FinishReason.LENGTH
        assert events.ids(name) == ids


@pytest.mark.parametrize("prefill_only", [True, False])
async def test_a_resumed_output_of_an_expensive_grammar_is_ended_while_it_is_replayed(
    demo: BuiltRunner, *, prefill_only: bool
) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_file(DEMO_MODELS / "llama")))
    output = tuple(
        tokenizer.encode("the words of an output that was begun elsewhere " * 12, add_special_tokens=False).ids
    )
    params = replace(endless(AMBIGUOUS["pairs"]), max_tokens=len(output) + TOKENS)
    async with running(demo) as (engine, events):
        engine.submit(request("resumed", PROMPT, params, output=output, prefill_only=prefill_only))
        await events.finished("resumed")
        await engine.abort("resumed")
    assert_too_expensive(events, "resumed")
    assert not events.ids("resumed")


async def test_requests_decode_while_the_grammar_of_a_reserved_one_is_compiled(
    demo: BuiltRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = endless(Grammar(GrammarKind.REGEX, "[a-y ]{2000}"), max_tokens=20)
    free = ResolvedSampling(max_tokens=20, temperature=1.0, seed=1, ignore_eos=True)
    go_on, compile_now = threading.Event(), demo.grammars.compile

    def compile_later(grammar: Grammar) -> LLMatcher:
        assert go_on.wait(300)
        return compile_now(grammar)

    monkeypatch.setattr(demo.grammars, "compile", compile_later)
    async with running(demo) as (engine, events):
        try:
            engine.reserve(request("slow", PROMPT, slow))
            engine.prefill_here("slow", ())
            for name in ("first", "second"):
                engine.submit(request(name, PROMPT, free))
                await events.finished(name)
            engine.reserve(request("third", PROMPT, free))
            engine.prefill_here("third", ())
            await events.finished("third")
            assert not events.ids("slow")
        finally:
            go_on.set()
        await events.finished("slow")
    assert not events.errors
    assert len(events.ids("slow")) == 20
