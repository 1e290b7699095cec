"""Drafts from grammars: they are what the grammar forces, and cost few masks."""

import json

import pytest
from tokenizers import Tokenizer

from baton.core.types import Grammar, GrammarKind
from baton.engine.request import IntArray, int_array
from baton.engine.speculation.acceptance import Basis
from baton.engine.speculation.allowance import Allowance
from baton.engine.speculation.grammar_drafts import GrammarDrafts
from baton.engine.speculation.speculator import Speculator
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.forced_tokens import ForcedTokens
from baton.settings.config import DEMO_MODELS, tokenizer_file
from tests.unit.engine.speculation.request import COSTS, ROOT, DecodingRequest, decode, work_of

TOKENIZER = tokenizer_file(DEMO_MODELS / "llama")
EOS = 4095
VALUE = {
    "full_name": "Ada Lovelace",
    "postal_address": {"street_name": "St James's Square", "house_number": 12, "country_code": "GB"},
    "occupation": "mathematician",
    "is_active_member": True,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "full_name": {"type": "string"},
        "postal_address": {
            "type": "object",
            "properties": {
                "street_name": {"type": "string"},
                "house_number": {"type": "integer"},
                "country_code": {"type": "string", "enum": ["GB", "US"]},
            },
            "required": ["street_name", "house_number", "country_code"],
            "additionalProperties": False,
        },
        "occupation": {"type": "string"},
        "is_active_member": {"type": "boolean"},
    },
    "required": ["full_name", "postal_address", "occupation", "is_active_member"],
    "additionalProperties": False,
}
JSON = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER))


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    compiler = GrammarCompiler(TOKENIZER, 4096, (EOS,))
    compiler.check(JSON)
    return compiler


@pytest.fixture
def states(compiler: GrammarCompiler) -> ForcedTokens:
    return ForcedTokens(compiler)


def tokens_of(tokenizer: Tokenizer, text: str) -> IntArray:
    return int_array(tokenizer.encode(text, add_special_tokens=False).ids)


def drafts_of(states: ForcedTokens, masks: int = 10**6) -> GrammarDrafts:
    return GrammarDrafts(JSON, states, Allowance(masks))


def drafted_text(drafts: GrammarDrafts, tokens: IntArray, tokenizer: Tokenizer, most: int = 8) -> str:
    return "".join(tokenizer.decode([token]) for token in drafts.propose(tokens, 0, most)[0])


def test_the_rest_of_a_key_is_forced(states: ForcedTokens, tokenizer: Tokenizer) -> None:
    drafts, start = drafts_of(states), tokens_of(tokenizer, '{"')
    tokens, bases = drafts.propose(start, 0, 8)
    key = "".join(
        tokenizer.decode([token]) for token, basis in zip(tokens, bases, strict=True) if basis is Basis.FORCED
    )
    assert key.startswith('full_name"')
    first = "".join(tokenizer.decode([token]) for token in tokens[:2])
    assert drafted_text(drafts_of(states), start, tokenizer, most=2) == first
    assert drafted_text(drafts_of(states), start, tokenizer, most=0) == ""


def test_within_a_string_nothing_is_drafted(states: ForcedTokens, tokenizer: Tokenizer) -> None:
    assert drafted_text(drafts_of(states), tokens_of(tokenizer, '{"full_name": "Ada'), tokenizer) == ""


def test_forced_drafts_are_what_the_grammar_allows_alone(
    compiler: GrammarCompiler, states: ForcedTokens, tokenizer: Tokenizer
) -> None:
    """Each draft token follows the grammar after the ones before it."""
    drafts, tokens = drafts_of(states), tokens_of(tokenizer, json.dumps(VALUE))
    num_drafts = 0
    for count in range(len(tokens)):
        proposed, _ = drafts.propose(tokens[:count], 0, 8)
        matcher = compiler.matcher(JSON)
        for token in [*tokens[:count], *proposed]:
            matcher.consume(token)
        num_drafts += len(proposed)
    assert num_drafts > len(tokens)


@pytest.mark.parametrize("indent", [None, 2])
def test_white_space_is_drafted_as_the_output_had_it_before(
    states: ForcedTokens, tokenizer: Tokenizer, indent: int | None
) -> None:
    text = json.dumps(VALUE, indent=indent)
    before, after = text[: text.index("occupation")], '": "'
    drafts, tokens = drafts_of(states), tokens_of(tokenizer, before)
    for count in range(len(tokens)):  # as it comes, token by token
        drafts.propose(tokens[:count], 0, 8)
    assert drafted_text(drafts, tokens, tokenizer).startswith("occupation" + after)


def test_drafts_do_not_depend_on_those_before(states: ForcedTokens, tokenizer: Tokenizer) -> None:
    """The state is rolled back after each walk."""
    tokens = tokens_of(tokenizer, json.dumps(VALUE))
    drafts = drafts_of(states)
    for count in range(len(tokens)):
        proposed, bases = drafts.propose(tokens[:count], 0, 8)
        forced, _ = drafts_of(states).propose(tokens[:count], 0, 8)
        if bases and bases[0] is Basis.FORCED:
            assert proposed[0] == forced[0]


def test_masks_are_not_computed_twice(states: ForcedTokens, tokenizer: Tokenizer) -> None:
    """The drafts that were right shorten those that are known."""
    tokens, allowance = tokens_of(tokenizer, json.dumps(VALUE)), Allowance(10**6)
    drafts = GrammarDrafts(JSON, states, allowance)
    for count in range(len(tokens)):
        drafts.propose(tokens[:count], 0, 8)
        drafts.propose(tokens[:count], 0, 8)
    assert 10**6 - allowance._left < 2 * len(tokens)


def test_all_requests_together_get_so_many_masks(states: ForcedTokens, tokenizer: Tokenizer) -> None:
    allowance, start = Allowance(5), tokens_of(tokenizer, '{"')
    first, second = GrammarDrafts(JSON, states, allowance), GrammarDrafts(JSON, states, allowance)
    assert len(first.propose(start, 0, 8)[0]) == 5
    assert len(second.propose(start, 0, 8)[0]) == 0
    allowance.refill()
    assert len(second.propose(start, 0, 8)[0]) == 5


def test_an_output_that_leaves_its_grammar_is_not_followed(states: ForcedTokens, tokenizer: Tokenizer) -> None:
    drafts, tokens = drafts_of(states), tokens_of(tokenizer, '{"')
    assert drafted_text(drafts, tokens, tokenizer)
    tokens.append(tokens_of(tokenizer, "}")[0])
    assert drafted_text(drafts, tokens, tokenizer) == ""
    tokens.append(EOS)
    assert drafted_text(drafts, tokens, tokenizer) == ""


def test_a_grammar_that_is_not_compiled_yet_is_followed_later(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(TOKENIZER, 4096, (EOS,))
    drafts, tokens = GrammarDrafts(JSON, ForcedTokens(compiler), Allowance(100)), tokens_of(tokenizer, '{"')
    assert drafted_text(drafts, tokens, tokenizer) == ""
    compiler.check(JSON)
    assert drafted_text(drafts, tokens, tokenizer).startswith("full_name")


@pytest.mark.parametrize("indent", [None, 2])
def test_json_by_schema_takes_fewer_steps(states: ForcedTokens, tokenizer: Tokenizer, indent: int | None) -> None:
    target = [*tokens_of(tokenizer, json.dumps(VALUE, indent=indent)), EOS]
    prompt = tokens_of(tokenizer, "Describe a person.")
    without = decode(Speculator(), DecodingRequest("1", prompt, target), grammar=JSON)
    steps = decode(Speculator(grammars=states), DecodingRequest("2", prompt, target), grammar=JSON)
    assert steps < without / 1.5


def test_a_match_goes_on_after_what_the_grammar_forces(states: ForcedTokens, tokenizer: Tokenizer) -> None:
    target = [*tokens_of(tokenizer, json.dumps(VALUE)), EOS]
    speculator = Speculator(grammars=states, always=True)
    decode(speculator, DecodingRequest("1", [1, 2], target), grammar=JSON)
    again = DecodingRequest("2", [3, 4], target)
    again.tokens.extend(target[1:4])
    speculator.begin(again, root=ROOT, grammar=JSON)
    assert len(speculator.choose([again], work_of([again]), COSTS, room=64)["2"]) > 8
    assert decode(speculator, again, grammar=JSON) < len(target) / 6
