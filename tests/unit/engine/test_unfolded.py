"""Rows with drafts become rows of single tokens, and their draws become one result per row again."""

from baton.core.errors import InternalError
from baton.core.sampling import ResolvedSampling
from baton.core.types import Grammar, GrammarKind, TokenOutput
from baton.engine.batch import Batch, BatchRow, RowResult, ScoreRow
from baton.engine.device.unfolded import unfold, unfolds
from baton.engine.pooling import PoolRow
from baton.engine.request import int_array
from baton.engine.sampling.row import GREEDY_ROW, SampleRow

BLOCKS = int_array([3, 1])
ERROR = InternalError("not finite")


def row(name: str, start: int, *tokens: int, drafts: int = 0, sample: SampleRow | None = GREEDY_ROW) -> BatchRow:
    return BatchRow(name, int_array(tokens), start, BLOCKS, sample, num_drafts=drafts)


def drawn(*tokens: int) -> list[RowResult]:
    return [TokenOutput(token, index) for index, token in enumerate(tokens)]


def kept(result: RowResult) -> list[int]:
    assert isinstance(result, tuple)
    return [token.token_id for token in result]


def test_each_draft_is_a_row_of_its_own_place() -> None:
    batch = Batch(7, (row("a", 4, 9), row("b", 6, 5, 6, 7, drafts=2)))
    plain, newest, first, second = unfold(batch).batch.shared_rows
    assert plain is batch.shared_rows[0]
    assert newest == row("b", 6, 5)
    assert first == row("b", 7, 6)._replace(sample=GREEDY_ROW._replace(output_index=1))
    assert second == row("b", 8, 7)._replace(sample=GREEDY_ROW._replace(output_index=2))
    assert newest.block_ids is first.block_ids is second.block_ids


def test_rows_of_single_tokens_come_first_and_first_tokens_keep_their_places() -> None:
    prompt, chunk = row("p", 0, 1, 2, 3, sample=None), row("c", 0, 1, 2, 3, 8, drafts=1)
    rows = row("a", 4, 9), row("b", 6, 5, 6, drafts=1), prompt, row("d", 3, 5, 6, 7, drafts=2), chunk
    unfolded = unfold(Batch(0, rows))
    names = [(each.request_id, each.token_start, len(each.token_ids)) for each in unfolded.batch.shared_rows]
    assert names == [
        *(("a", 4, 1), ("b", 6, 1), ("d", 3, 1), ("b", 7, 1), ("d", 4, 1), ("d", 5, 1), ("c", 3, 1)),
        *(("p", 0, 3), ("c", 0, 3)),
    ]
    assert unfolded.places == [[0], [1, 3], [7], [2, 4, 5], [8, 6]]
    assert unfolded.batch.shared_rows[7] is prompt


def test_scores_and_pools_keep_their_rows() -> None:
    score, pool = ScoreRow(int_array([2, 3]), 1), PoolRow(0, 3)
    prompts = row("s", 0, 1, 2, 3), row("p", 0, 1, 2, 3, sample=None)
    batch = Batch(0, (row("b", 6, 5, 6, 7, drafts=2), *prompts), scores=((1, score),), pools=((2, pool),))
    unfolded = unfold(batch)
    assert unfolded.batch.scores == ((3, score),)
    assert unfolded.batch.pools == ((4, pool),)
    assert unfolded.by_row({3: "score"}) == {1: "score"}
    assert unfolded.by_row({4: "pool"}) == {2: "pool"}


def test_later_draws_know_the_drafts_before_them() -> None:
    grammar = Grammar(GrammarKind.CHOICE, '["a"]')
    params = ResolvedSampling(temperature=0.0, min_tokens=4, grammar=grammar)
    sample = SampleRow(params, 2, (50, 51), int_array([1, 2, 3, 4, 5]), 3, int_array([4, 5]))
    samples = [each.sample for each in unfold(Batch(0, (row("a", 4, 5, 6, 7, drafts=2, sample=sample),))).batch.rows]
    assert samples == [
        sample,
        SampleRow(params, 3, (50, 51), int_array([1, 2, 3, 4, 5, 6]), 3, int_array([4, 5, 6])),
        SampleRow(params, 4, (), int_array([1, 2, 3, 4, 5, 6, 7]), 3, int_array([4, 5, 6, 7])),
    ]


def test_a_request_without_penalties_or_grammar_gets_no_history() -> None:
    sample = SampleRow(ResolvedSampling(temperature=0.0), 2, (), int_array(), 3)
    later = sample.after(int_array([4, 5]))
    assert later == sample._replace(output_index=4)


def results(draws: list[RowResult], *drafts: int) -> RowResult:
    newest = 3
    unfolded = unfold(Batch(0, (row("a", 4, newest, *drafts, drafts=len(drafts)),)))
    (result,) = unfolded.results(draws)
    return result


def test_the_draws_up_to_the_first_wrong_draft_are_kept() -> None:
    assert kept(results(drawn(5, 6, 7), 5, 6)) == [5, 6, 7]
    assert kept(results(drawn(5, 9, 7), 5, 6)) == [5, 9]
    assert kept(results(drawn(9, 6, 7), 5, 6)) == [9]


def test_a_draft_that_is_right_after_a_wrong_one_is_dropped() -> None:
    assert kept(results(drawn(9, 6, 8, 1), 5, 6, 8)) == [9]


def test_an_error_fails_the_row_only_in_place_of_its_first_draw() -> None:
    assert results([ERROR, *drawn(6, 7)], 5, 6) is ERROR
    assert results([ERROR, ERROR, ERROR], 5, 6) is ERROR
    assert kept(results([*drawn(5), ERROR, *drawn(7)], 5, 6)) == [5]
    assert kept(results([*drawn(9), ERROR, ERROR], 5, 6)) == [9]
    assert kept(results([*drawn(5, 6), ERROR], 5, 6)) == [5, 6]


def test_results_come_in_the_order_of_the_given_rows() -> None:
    rows = row("a", 4, 9), row("b", 6, 5, 6, drafts=1), row("p", 0, 1, 2, sample=None), row("c", 3, 5, 8, drafts=1)
    unfolded = unfold(Batch(0, rows))
    of_places = {0: 11, 1: 6, 3: 12, 2: 13, 4: 14}
    draws: list[RowResult] = [TokenOutput(of_places[place], 0) for place in range(5)]
    plain, right, nothing, wrong = unfolded.results([*draws, None])
    assert isinstance(plain, TokenOutput)
    assert (plain.token_id, kept(right), nothing, kept(wrong)) == (11, [6, 12], None, [13])


def test_rows_of_single_tokens_are_not_looked_at() -> None:
    assert not unfolds(())
    assert not unfolds((row("a", 4, 9), row("b", 0, 1, 2)))
    assert unfolds((row("a", 4, 9), row("b", 4, 1, 2, drafts=1), row("c", 0, 1, 2)))
    read: list[int] = []

    class Rows(list[BatchRow]):
        def __reversed__(self):  # type: ignore[no-untyped-def]
            for place in range(len(self) - 1, -1, -1):
                read.append(place)
                yield self[place]

    assert not unfolds(Rows([row("a", 4, 9)] * 100))
    assert read == [99]
