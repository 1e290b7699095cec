"""The time budget of an output's masks, with clocks that the tests set."""

from collections.abc import Callable, Iterator
from itertools import count

import numpy as np
import pytest
from tokenizers import Tokenizer

from baton.core.errors import InvalidRequest
from baton.core.types import Grammar, GrammarKind
from baton.grammar.budget import MaskBudget
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.matcher import MaskFiller, Matcher
from tests.unit.grammar.conftest import EOS, TOKENIZER, VOCAB_SIZE

LETTERS = Grammar(GrammarKind.REGEX, "[a-z]{2000}")


def clock(step_s: float) -> Callable[[], float]:
    """Each look at it takes this long."""
    ticks: Iterator[int] = count()
    return lambda: next(ticks) * step_s


def matcher_of(clock: Callable[[], float] | None) -> Matcher:
    """Follows letters; compiled with a clock that stands still, so that compiling costs nothing."""
    matcher = GrammarCompiler(TOKENIZER, VOCAB_SIZE, (EOS,), clock=None).matcher(LETTERS)
    matcher.budget = MaskBudget(clock)
    return matcher


def test_masks_may_take_their_time_on_average() -> None:
    budget = MaskBudget(clock(0.0))
    for _ in range(10_000):
        budget.charge_mask(0.0039)
    for _ in range(20):
        budget.charge_mask(0.05)
        for _ in range(12):
            budget.charge_mask(0.0)
    budget.check()


@pytest.mark.parametrize(("seconds", "most"), [(0.2, 1), (0.03, 4), (0.0061, 48)])
def test_masks_that_take_too_long_are_ended_sooner_the_longer_they_take(seconds: float, most: int) -> None:
    budget = MaskBudget(clock(0.0))
    for _ in range(most - 1):
        budget.charge_mask(seconds)
    budget.check()
    budget.charge_mask(seconds)
    for _ in range(100):
        budget.charge_mask(0.0)
    with pytest.raises(InvalidRequest, match=r"too expensive.*4 ms a token.*left recursion") as ended:
        budget.check()
    assert ended.value.field == "grammar"


def test_an_expensive_token_ends_an_output_before_its_next_mask(tokenizer: Tokenizer) -> None:
    (a,) = tokenizer.encode("a", add_special_tokens=False).ids
    matcher = matcher_of(clock(0.011))
    with pytest.raises(InvalidRequest, match=r"too expensive"):
        matcher.consume(a)


def test_only_the_expensive_one_of_many_outputs_is_ended(tokenizer: Tokenizer) -> None:
    (a,) = tokenizer.encode("a", add_special_tokens=False).ids
    masks = np.empty((3, matcher_of(None).words), np.int32)
    matchers = [matcher_of(clock(0.0)), matcher_of(clock(0.009)), matcher_of(None)]
    filler = MaskFiller(clock(0.01))
    expected = np.empty_like(masks[:1])
    assert MaskFiller().fill([matcher_of(None)], expected) == [None]
    errors: list[InvalidRequest | None] = []
    while not errors or (errors[-1] is None and len(errors) < 100):
        cheap, expensive, unbounded = filler.fill(matchers, masks)
        assert cheap is None
        assert unbounded is None
        assert (masks[[0, 2]] == expected).all()
        errors.append(expensive)
    assert "too expensive" in str(errors[-1])
    assert 20 < len(errors) < 25
    matchers[0].consume(a)


def test_outputs_are_not_timed_one_by_one_while_all_are_fast() -> None:
    matchers = [matcher_of(clock(0.2)), matcher_of(clock(0.2))]
    masks = np.empty((2, matchers[0].words), np.int32)
    filler = MaskFiller(clock(0.001))
    for _ in range(10):
        assert filler.fill(matchers, masks) == [None, None]


def test_a_rank_without_a_clock_ends_no_output(tokenizer: Tokenizer) -> None:
    (a,) = tokenizer.encode("a", add_special_tokens=False).ids
    matcher = matcher_of(None)
    for _ in range(50):
        matcher.consume(a)
    assert MaskFiller(clock(1.0)).fill([matcher], np.empty((1, matcher.words), np.int32)) == [None]


def test_a_grammar_whose_first_mask_takes_too_long_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"no output can follow the grammar: .*too expensive"):
        GrammarCompiler(TOKENIZER, VOCAB_SIZE, (EOS,), clock=clock(0.2)).check(LETTERS)
