"""Drafts of requests with grammars: every draw has the mask that decoding gives it, whatever is drafted."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from baton.core.errors import InvalidRequest
from baton.core.sampling import ResolvedSampling
from baton.core.types import Grammar, GrammarKind
from baton.engine.batch import Batch, BatchRow
from baton.engine.build import BuiltRunner
from baton.engine.device.grammar_rows import GrammarRows
from baton.engine.device.graphs import GraphSettings
from baton.engine.device.unfolded import unfold
from baton.engine.request import int_array
from baton.engine.sampling.row import SampleRow
from baton.grammar.compiler import GrammarCompiler
from baton.settings.config import DEMO_MODELS, tokenizer_file
from tests.unit.engine.drafted import (
    Asked,
    Outputs,
    any_drafts,
    assert_same,
    right,
    token_by_token,
    with_drafts,
    wrong_at,
)
from tests.unit.engine.driver import runner_of
from tests.unit.engine.test_grammar import GRAMMARS
from tests.unit.engine.tiny import build

EOS = 4095
VOCAB_SIZE = 4096
COUNT = 24
DRAFTERS = {
    "right": right(3),
    "wrong at 1": wrong_at(1, 3, VOCAB_SIZE),
    "any": any_drafts(3, 5, VOCAB_SIZE),
    "end": lambda coming: [*coming[:1], EOS, EOS],
    "impossible": lambda coming: [*coming[:2], 7, 7, 7],
}
GRAPHS = GraphSettings(max_requests=128, max_context_tokens=128, max_tokens=512)


@pytest.fixture(scope="module")
def demo() -> BuiltRunner:
    return build(DEMO_MODELS / "llama", num_blocks=1024, block_size=16)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer_file(DEMO_MODELS / "llama")))


def asked() -> dict[str, Asked]:
    """Outputs of every kind of grammar, which end early, and go on with ends, as their clients do not care for ends."""
    found: dict[str, Asked] = {"free": Asked(range(40, 60), {"temperature": 1.0, "seed": 4})}
    for kind, (text, _) in GRAMMARS.items():
        grammar = {"grammar": Grammar(kind, text)}
        found[f"{kind} greedy"] = Asked(range(40, 60), grammar)
        drawn: dict[str, Any] = {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.3, "logprobs": 1}
        found[f"{kind} drawn"] = Asked(range(40, 60), {**grammar, **drawn, "min_tokens": 6})
    return found


@pytest.fixture(scope="module")
def expected(demo: BuiltRunner) -> Outputs:
    return token_by_token(runner_of(demo, graphs=None), asked(), COUNT, end_token_ids=frozenset({EOS}))


def test_outputs_end_within_the_tokens_that_are_compared(expected: Outputs) -> None:
    assert sum(tokens[-1].token_id == EOS for tokens in expected.values()) >= 4


@pytest.mark.parametrize("graphs", [None, GRAPHS], ids=["eager", "padded"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_any_drafts_give_the_tokens_of_decoding(
    demo: BuiltRunner, expected: Outputs, drafter: str, graphs: GraphSettings | None
) -> None:
    runner = runner_of(demo, graphs=graphs)
    runner.prepare()
    outputs, steps = with_drafts(runner, asked(), expected, DRAFTERS[drafter], end_token_ids=frozenset({EOS}))
    assert_same(outputs, expected)
    assert steps < COUNT


def row(name: str, grammar: Grammar, output: Sequence[int], drafts: Sequence[int], **params: Any) -> BatchRow:
    sampling = ResolvedSampling(temperature=0.0, grammar=grammar, **params)
    sample = SampleRow(sampling, len(output), (), int_array(), 1, int_array(tuple(output)))
    tokens = int_array((output[-1] if output else 0, *drafts))
    return BatchRow(name, tokens, len(output), int_array([0]), sample, num_drafts=len(drafts))


def masks_of(grammars: GrammarRows, *rows: BatchRow) -> tuple[dict[tuple[str, int], list[int]], dict[Any, Any]]:
    """The allowed tokens by request and number of drafts before them, and the errors by the same."""
    unfolded = unfold(Batch(0, rows))
    drawn = unfolded.batch.rows
    names = {
        place: (rows[index].request_id, count)
        for index, each in enumerate(unfolded.places)
        for count, place in enumerate(each)
    }
    masks, failed = grammars.masks(drawn)
    errors = {names[place]: error for place, error in failed.items()}
    if masks is None:
        return {}, errors
    bits = np.unpackbits(masks.masks_GW.view(np.uint8), axis=1, bitorder="little")
    found = dict(zip(masks.rows_G.tolist(), bits, strict=True))
    return {names[place]: np.flatnonzero(found[place]).tolist() for place in found}, errors


@pytest.fixture
def grammars(demo: BuiltRunner) -> GrammarRows:
    return GrammarRows(demo.grammars, torch.device("cpu"))


CHOICE = Grammar(GrammarKind.CHOICE, '["abcdef", "abxy"]')


def test_a_draw_after_a_draft_has_the_mask_after_that_draft(grammars: GrammarRows, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("abxy", add_special_tokens=False).ids
    masks, errors = masks_of(grammars, row("a", CHOICE, (), tokens))
    alone = GrammarRows(grammars._compiler, torch.device("cpu"))
    assert not errors
    for count in range(len(tokens) + 1):
        assert masks["a", count] == masks_of(alone, row("a", CHOICE, tokens[:count], ()))[0]["a", 0]
    assert masks["a", len(tokens)] == [EOS]


def test_draws_after_an_impossible_draft_have_no_mask(grammars: GrammarRows, tokenizer: Tokenizer) -> None:
    first, *others = tokenizer.encode("abxy", add_special_tokens=False).ids
    masks, errors = masks_of(
        grammars, row("a", CHOICE, (), (first, 7, *others)), row("b", CHOICE, (), (first, *others))
    )
    assert sorted(masks) == [("a", 0), ("a", 1), *(("b", count) for count in range(len(others) + 2))]
    assert not errors


def test_an_end_may_be_a_draft(grammars: GrammarRows, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("abxy", add_special_tokens=False).ids
    masks, _ = masks_of(grammars, row("a", CHOICE, tokens, (EOS, EOS)), row("b", CHOICE, tokens[:1], (EOS, EOS)))
    assert [masks["a", count] for count in range(3)] == [[EOS]] * 3
    assert sorted(masks) == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]


def test_ends_that_the_request_does_not_want_are_forbidden_after_drafts_too(
    grammars: GrammarRows, tokenizer: Tokenizer
) -> None:
    digits = Grammar(GrammarKind.REGEX, "[0-9]{1,9}")
    tokens = tokenizer.encode("12", add_special_tokens=False).ids
    wanted, unwanted = row("a", digits, (), tokens), row("b", digits, (), tokens, ignore_eos=True)
    masks, _ = masks_of(grammars, wanted, unwanted)
    for count in range(1, len(tokens) + 1):
        assert EOS in masks["a", count]
        assert EOS not in masks["b", count]


def test_a_matcher_goes_back_to_the_tokens_that_were_kept(grammars: GrammarRows, tokenizer: Tokenizer) -> None:
    """Right drafts are not taken a second time, wrong ones are taken back."""
    ab, cdef, xy = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("ab", "cdef", "xy"))
    abcdef, abxy = ab + cdef, ab + xy
    masks_of(grammars, row("a", CHOICE, (), abcdef))
    matcher = grammars._followed["a"].matcher
    masks, _ = masks_of(grammars, row("a", CHOICE, [*ab, xy[0]], xy[1:]))
    assert grammars._followed["a"].matcher is matcher
    assert grammars._followed["a"].tokens == int_array(abxy)
    assert masks["a", len(xy) - 1] == [EOS]


class Following:
    """Random walks with random drafts, and a new matcher for each draw to compare with."""

    def __init__(self, compiler: GrammarCompiler, grammar: Grammar, seed: int) -> None:
        self._draw = random.Random(seed)
        self._compiler = compiler
        self._grammar = grammar
        self._grammars = GrammarRows(compiler, torch.device("cpu"))
        self._output: list[int] = []

    def allowed(self, output: Sequence[int]) -> list[int]:
        fresh = GrammarRows(self._compiler, torch.device("cpu"))
        return masks_of(fresh, row("a", self._grammar, output, ()))[0]["a", 0]

    def step(self) -> None:
        drafts: list[int] = []
        for _ in range(self._draw.randrange(5)):
            drafts.append(self._draw.choice(self.allowed(self._output + drafts)))
        masks, errors = masks_of(self._grammars, row("a", self._grammar, self._output, drafts))
        assert not errors
        for count in range(len(drafts) + 1):
            assert masks["a", count] == self.allowed(self._output + drafts[:count])
        kept = drafts[: self._draw.randrange(len(drafts) + 1)]
        self._output += [*kept, self._draw.choice(masks["a", len(kept)])]


@pytest.mark.parametrize("kind", GRAMMARS)
def test_masks_after_any_drafts_equal_those_of_a_new_matcher(demo: BuiltRunner, kind: GrammarKind) -> None:
    following = Following(demo.grammars, Grammar(kind, GRAMMARS[kind][0]), seed=5)
    for _ in range(25):
        following.step()


def test_an_output_that_breaks_its_grammar_fails_the_first_draw(grammars: GrammarRows) -> None:
    masks, errors = masks_of(grammars, row("a", CHOICE, (7,), (7, 8)))
    assert masks == {}
    assert list(errors) == [("a", 0)]
    assert isinstance(errors["a", 0], InvalidRequest)


# Each more token has more readings.
AMBIGUOUS = Grammar(GrammarKind.LARK, 'start: e\ne: e e | "x"')


def test_a_grammar_that_fails_after_a_wrong_draft_is_followed_again(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer_file(DEMO_MODELS / "llama"), VOCAB_SIZE, (EOS,), clock=None)
    grammars = GrammarRows(compiler, torch.device("cpu"))
    x = tokenizer.encode("x", add_special_tokens=False).ids
    _, errors = masks_of(grammars, row("a", AMBIGUOUS, x, x * 1000))
    ((_, count),) = errors
    assert 100 < count < 1000
    failed = grammars._followed["a"].matcher
    masks, errors = masks_of(grammars, row("a", AMBIGUOUS, x * 5, x * 2))
    assert not errors
    assert [masks["a", count] == masks["a", 0] for count in range(3)] == [True] * 3
    assert grammars._followed["a"].matcher is not failed
    assert grammars._followed["a"].matcher.budget is failed.budget


def test_a_matcher_that_has_failed_is_not_used_again(grammars: GrammarRows, tokenizer: Tokenizer) -> None:
    """A draft may fail it after tokens that are all kept."""
    first, *others = tokenizer.encode("abxy", add_special_tokens=False).ids
    expected, _ = masks_of(grammars, row("a", CHOICE, (first,), others))
    failed = grammars._followed["a"].matcher
    assert not failed.state.consume_token(7)
    masks, errors = masks_of(grammars, row("a", CHOICE, (first, *others), ()))
    assert not errors
    assert masks["a", 0] == expected["a", len(others)]
    assert grammars._followed["a"].matcher is not failed


def test_the_time_of_wrong_drafts_fails_neither_the_step_nor_the_output(tokenizer: Tokenizer) -> None:
    """What follows a right draft is cheap, and what follows a wrong one is too expensive."""
    x = tokenizer.encode("x", add_special_tokens=False).ids
    now = [0.0]

    def clock() -> float:
        followed = slow._followed.get("a")
        now[0] += 0.0 if followed is None or len(followed.tokens) < 3 else 1.0
        return now[0]

    compiler = GrammarCompiler(tokenizer_file(DEMO_MODELS / "llama"), VOCAB_SIZE, (EOS,), clock=clock)
    slow = GrammarRows(compiler, torch.device("cpu"))
    masks, errors = masks_of(slow, row("a", AMBIGUOUS, x, x * 4))
    assert sorted(errors) == [("a", 2)]
    assert {count for _, count in masks} == {0, 1}
    for _ in range(2):
        again, errors = masks_of(slow, row("a", AMBIGUOUS, x * 2, ()))
        assert not errors
        assert again["a", 0] == masks["a", 1]
    _, errors = masks_of(slow, row("a", AMBIGUOUS, x * 3, ()))
    assert list(errors) == [("a", 0)]


def test_a_new_request_has_the_time_of_a_new_output_if_an_aborted_one_had_its_id(tokenizer: Tokenizer) -> None:
    x = tokenizer.encode("x", add_special_tokens=False).ids
    now, slow_s = [0.0], [0.0]

    def clock() -> float:
        now[0] += slow_s[0]
        return now[0]

    compiler = GrammarCompiler(tokenizer_file(DEMO_MODELS / "llama"), VOCAB_SIZE, (EOS,), clock=clock)
    grammars = GrammarRows(compiler, torch.device("cpu"))
    masks_of(grammars, row("a", AMBIGUOUS, x, ()))
    slow_s[0] = 1.0
    assert masks_of(grammars, row("a", AMBIGUOUS, x, ()))[1], "too slow"
    slow_s[0] = 0.0
    assert not masks_of(grammars, row("a", AMBIGUOUS, (), x))[1]
