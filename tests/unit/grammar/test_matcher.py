"""One output token by token: what a mask allows, when the output may end, and how many masks are filled at once."""

from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from baton.core.errors import InvalidRequest
from baton.core.types import Grammar, GrammarKind
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.matcher import MaskFiller, Matcher, allow, allows, forbid
from tests.unit.grammar.conftest import EOS, TOKENIZER, VOCAB_SIZE

CHOICE = Grammar(GrammarKind.CHOICE, '["yes", "no"]')


def allowed(*matchers: Matcher) -> list[set[int]]:
    masks = np.empty((len(matchers), matchers[0].words), np.int32)
    assert MaskFiller().fill(matchers, masks) == [None] * len(matchers)
    return [bits_of(mask) for mask in masks]


def bits_of(mask: NDArray[np.int32]) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def after(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar, text: str) -> Matcher:
    matcher = compiler.matcher(grammar)
    for token_id in tokenizer.encode(text, add_special_tokens=False).ids:
        matcher.consume(token_id)
    return matcher


def test_a_mask_allows_the_tokens_that_continue_the_output(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    (ids,) = allowed(compiler.matcher(CHOICE))
    assert ids
    texts = [tokenizer.decode([token_id]) for token_id in ids]
    assert all("yes".startswith(text) or "no".startswith(text) for text in texts)


def test_a_complete_grammar_allows_only_the_end(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = after(compiler, tokenizer, CHOICE, "yes")
    assert matcher.is_accepting
    assert matcher.is_ended
    assert allowed(matcher) == [{EOS}]
    matcher.consume(EOS)
    assert allowed(matcher) == [{EOS}]
    with pytest.raises(InvalidRequest, match="breaks the grammar"):
        matcher.consume(5)


def test_an_output_may_end_only_where_its_grammar_accepts(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    digits = Grammar(GrammarKind.REGEX, "[0-9]{2,4}")
    matcher = after(compiler, tokenizer, digits, "1")
    assert not matcher.is_accepting
    with pytest.raises(InvalidRequest, match="breaks the grammar") as refused:
        matcher.consume(EOS)
    assert refused.value.field == "grammar"
    matcher = after(compiler, tokenizer, digits, "12")
    assert matcher.is_accepting
    assert not matcher.is_ended
    assert EOS in allowed(matcher)[0]
    matcher.consume(EOS)
    assert matcher.is_ended


def test_every_end_of_sequence_ends_an_output(tokenizer: Tokenizer) -> None:
    (other,) = tokenizer.encode("~", add_special_tokens=False).ids
    compiler = GrammarCompiler(TOKENIZER, VOCAB_SIZE, (EOS, other))
    assert allowed(after(compiler, tokenizer, CHOICE, "no")) == [{EOS, other}]


def test_ids_without_a_token_are_never_allowed(compiler: GrammarCompiler) -> None:
    anything = compiler.matcher(Grammar(GrammarKind.LARK, "start: <[*]>*"))
    (ids,) = allowed(anything)
    assert max(ids) < 4096
    assert len(ids) > 4000


def test_masks_of_a_batch_equal_those_of_each_row_alone(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    json_object = Grammar(GrammarKind.JSON_OBJECT)
    texts = ['{"a', '{"abc": 1', '{"abc": [1, 2', "{", '{"a": {}}']
    together = allowed(*(after(compiler, tokenizer, json_object, text) for text in texts))
    assert together == [allowed(after(compiler, tokenizer, json_object, text))[0] for text in texts]
    assert together[-1] == {EOS}


def test_matchers_of_one_grammar_do_not_share_state(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    first = after(compiler, tokenizer, CHOICE, "yes")
    second = compiler.matcher(CHOICE)
    assert first.is_ended
    assert not second.is_accepting


def test_a_row_that_cannot_be_followed_fails_alone(compiler: GrammarCompiler) -> None:
    broken, whole = compiler.matcher(CHOICE), compiler.matcher(CHOICE)
    with pytest.raises(InvalidRequest):
        broken.consume(EOS)
    with pytest.raises(InvalidRequest):
        broken.consume(EOS - 1)
    masks = np.empty((2, whole.words), np.int32)
    failed, fine = MaskFiller().fill([broken, whole], masks)
    assert isinstance(failed, InvalidRequest)
    assert fine is None
    assert bits_of(masks[1]) == allowed(compiler.matcher(CHOICE))[0]


ENDLESS = Grammar(GrammarKind.REGEX, "[a-z ]*")


def test_tokens_that_are_taken_back_leave_the_masks_of_before(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    json_object = Grammar(GrammarKind.JSON_OBJECT)
    ids = tokenizer.encode('{"abc": [1, "two"]}', add_special_tokens=False).ids
    matcher, expected = compiler.matcher(json_object), []
    for token_id in ids:
        expected.append(allowed(matcher)[0])
        matcher.consume(token_id)
    assert matcher.is_ended
    for count in (1, 2, len(ids)):
        assert matcher.take_back(count)
        assert not matcher.is_ended
        assert allowed(matcher) == [expected[len(ids) - count]]
        for token_id in ids[len(ids) - count :]:
            matcher.consume(token_id)
        assert matcher.is_ended


@pytest.mark.parametrize("grammar", [CHOICE, ENDLESS], ids=["complete", "endless"])
def test_ends_can_be_taken_back(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar) -> None:
    matcher = after(compiler, tokenizer, grammar, "yes")
    (before,) = allowed(matcher)
    for count in (1, 2, 3):
        for _ in range(count):
            matcher.consume(EOS)
        assert allowed(matcher) == [{EOS}]
        assert matcher.take_back(count)
        assert allowed(matcher) == [before]
    matcher.consume(EOS)
    matcher.consume(EOS)
    assert matcher.take_back(1)
    assert allowed(matcher) == [{EOS}]
    (token,) = tokenizer.encode("yes", add_special_tokens=False).ids[-1:]
    assert matcher.take_back(2)
    matcher.consume(token)
    assert allowed(matcher) == [before]


def test_a_matcher_that_has_failed_cannot_go_back(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = after(compiler, tokenizer, ENDLESS, "some text")
    assert matcher.take_back(0)
    with pytest.raises(InvalidRequest):
        matcher.consume(tokenizer.encode("1", add_special_tokens=False).ids[0])
    assert not matcher.take_back(0)
    assert not matcher.take_back(1)


@pytest.mark.parametrize("grammar", ["start: /a+/ <|endoftext|>", 'start: (/a+/ <|endoftext|> "b"?)+'])
def test_an_end_that_the_grammar_itself_names_can_be_taken_back(
    compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: str
) -> None:
    """Every walk of drafts leaves the matcher as one that has never seen them."""
    named = Grammar(GrammarKind.LARK, grammar)
    matcher, output, random = after(compiler, tokenizer, named, "a"), "a", Random(5)
    for _ in range(40):
        drafts = 0
        while drafts < 6 and not matcher.is_ended:
            (ids,) = allowed(matcher)
            matcher.consume(EOS if EOS in ids else random.choice(sorted(ids)))
            drafts += 1
        assert matcher.take_back(drafts)
        fresh = after(compiler, tokenizer, named, output)
        assert allowed(matcher) == allowed(fresh)
        assert (matcher.is_accepting, matcher.is_ended) == (fresh.is_accepting, fresh.is_ended)
        output += "a"
        for token_id in tokenizer.encode("a", add_special_tokens=False).ids:
            matcher.consume(token_id)


def test_a_mask_says_which_tokens_it_allows() -> None:
    mask = np.zeros(3, np.int32)
    for token_id in (0, 31, 32, 63, 95):
        allow(mask, token_id)
    assert [token_id for token_id in range(96) if allows(mask, token_id)] == [0, 31, 32, 63, 95]


def test_forbidding_every_allowed_token_forbids_none() -> None:
    mask = np.zeros(3, np.int32)
    mask.view(np.uint32)[1] = 0x80000001
    forbid(mask, (32,))
    assert bits_of(mask) == {63}
    forbid(mask, (63, 5))
    assert bits_of(mask) == {63}
