"""Batches arrive on another rank as they were sent. Unchanged rows are neither sent nor made again."""

import random

import pytest

from baton.core.sampling import ResolvedSampling
from baton.core.types import Grammar, GrammarKind
from baton.engine.batch import Batch, BatchRow, ScoreRow
from baton.engine.batch_stream import BatchReader, BatchWriter
from baton.engine.request import int_array
from baton.engine.sampling.row import SampleRow

GREEDY = ResolvedSampling(temperature=0.0)


def decode(name: str, start: int, blocks: list[int], *, since: int | None = None, history: int = 0) -> BatchRow:
    sample = SampleRow(GREEDY, start - 5, (), int_array(list(range(history))), 5 if history else 0)
    return BatchRow(name, int_array([0]), start, int_array(blocks), sample, 0, since)


def sent(batches: list[Batch]) -> list[tuple[Batch, int]]:
    """The batches that arrive, and the bytes of each message."""
    writer, reader = BatchWriter(), BatchReader()
    messages = [writer.write(batch) for batch in batches]
    return [(reader.read(message), len(message)) for message in messages]


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        ResolvedSampling(temperature=0.7, top_p=0.9, top_k=5, seed=2**64 - 1, logprobs=3),
        ResolvedSampling(grammar=Grammar(GrammarKind.JSON_SCHEMA, "{}"), seed=1),
        ResolvedSampling(logit_bias={4: -1.5}, stop=("ab", "c"), stop_token_ids=(1, 2), min_tokens=2, max_tokens=9),
    ],
)
def test_a_row_arrives_as_it_was(params: ResolvedSampling) -> None:
    sample = SampleRow(params, 3, (7, 8), int_array([1, 2, 3]), 2, int_array([4, 5, 6]))
    prompt = BatchRow("b", int_array([5, 6, 7]), 32, int_array([4, 9, 11]), None)
    scores = ((1, ScoreRow(int_array([6, 7, 8]), 20)),)
    batch = Batch(12, (BatchRow("a", int_array([0]), 100, int_array([1, 2]), sample, 1, 12), prompt), scores=scores)
    ((arrived, _),) = sent([batch])
    assert arrived == batch


def test_every_field_of_a_row_arrives() -> None:
    sample = SampleRow(GREEDY, 4, (), int_array(), 0)
    states = {"snapshots": ((1, 4),), "draft_slots": (8, 9), "state_next": 6}
    row = BatchRow("a", int_array([3, 4, 5]), 9, int_array([2]), sample, 1, 3, 2, 5, 1, num_drafts=2, **states)  # type: ignore[arg-type]
    row = row._replace(next_token=8)
    defaults = BatchRow._field_defaults
    assert all(getattr(row, name) != default for name, default in defaults.items()), "a field has its default"
    ((arrived, _),) = sent([Batch(3, (decode("b", 6, [1]), row))])
    assert arrived.shared_rows[1] == row


def test_copies_of_states_arrive() -> None:
    prompt = BatchRow("b", int_array([7] * 9), 0, int_array([2]), None, state_slot=2, snapshots=((4, 6), (8, 7)))
    rows = decode("a", 3, [1])._replace(state_slot=5), prompt
    batch = Batch(1, rows, restores=((2, 5),), copies=((5, 3), (4, 1)))
    ((arrived, _),) = sent([batch])
    assert arrived == batch


def test_what_the_layer_that_drafts_should_do_arrives() -> None:
    batches = [
        Batch(1, (decode("a", 3, [1]),), num_layer_drafts=2),
        Batch(2, (decode("a", 4, [1]),), writes_draft_kv=False),
    ]
    assert [arrived for arrived, _ in sent(batches)] == batches


def test_rows_that_stay_are_not_sent_and_stay_the_same_objects() -> None:
    rows = tuple(decode(f"request {index}", 20, list(range(100)), since=1) for index in range(200))
    (first, _), (second, num_bytes) = sent([Batch(1, rows), Batch(2, rows)])
    assert second.step == 2
    assert all(row is was for row, was in zip(second.shared_rows, first.shared_rows, strict=True))
    assert num_bytes < 50


def test_of_more_blocks_and_a_longer_history_only_the_new_ones_are_sent() -> None:
    before = decode("a", 1599, list(range(400)), history=1600)
    after = decode("a", 1600, list(range(401)), history=1601)
    (_, whole), (arrived, tail) = sent([Batch(1, (before,)), Batch(2, (after,))])
    assert arrived.shared_rows == (after,)
    assert whole > 8000
    assert tail < 150


def test_blocks_that_stay_are_the_same_array() -> None:
    (first, _), (second, _) = sent([Batch(1, (decode("a", 6, [3, 4]),)), Batch(2, (decode("a", 7, [3, 4]),))])
    assert second.shared_rows[0].block_ids is first.shared_rows[0].block_ids


def test_any_sequence_of_batches_arrives_as_it_was() -> None:
    """Requests come, go, grow, lose their blocks, and change places; steps shrink and grow again."""
    draw = random.Random(0)
    batches = []
    rows: list[BatchRow] = []
    for step in range(200):
        rows = [row for row in rows if draw.random() > 0.1]
        draw.shuffle(rows)
        for index, row in enumerate(rows):
            change = draw.random()
            if change < 0.4:
                blocks = [*row.block_ids, draw.randrange(99)] if change < 0.3 else [draw.randrange(99)] * 3
                rows[index] = decode(row.request_id, row.token_start + 1, blocks, history=draw.choice((0, step)))
        rows += [decode(f"{step} {index}", 6, [index]) for index in range(draw.randrange(4))]
        batches.append(Batch(step, tuple(rows)))
    assert [arrived for arrived, _ in sent(batches)] == batches
