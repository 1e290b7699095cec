"""The list of prefill tiles holds every token once, those with the most keys first."""

import random
from itertools import accumulate, pairwise

import pytest
import torch

from attention.kernels.paged.work_list import WorkList, WorkRow, list_work
from tests.device import DEVICE


def listed(
    query_lens: list[int], context_lens: list[int], *, tokens: int, first: int = 0, padding: int = 0
) -> WorkList:
    starts = torch.tensor([*accumulate(query_lens, initial=first)], dtype=torch.int32, device=DEVICE)
    seq_lens = [query_len + context for query_len, context in zip(query_lens, context_lens, strict=True)]
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
    return list_work(starts, lens, num_tokens=first + sum(query_lens) + padding, tokens=tokens, num_programs=4)


def rows_of(work: WorkList) -> list[WorkRow]:
    return [WorkRow(*row[:5]) for row in work.rows[: int(work.count)].tolist()]


def last_key(row: WorkRow, tokens: int) -> int:
    return row.seq_len - row.query_len + min(row.first_token + tokens, row.query_len)


@pytest.mark.parametrize("tokens", [16, 32, 128])
@pytest.mark.parametrize("first", [0, 5, 33])
def test_every_token_of_every_request_is_in_one_tile(tokens: int, first: int) -> None:
    generator = random.Random(tokens + first)
    for _ in range(4):
        query_lens = [generator.choice((0, 1, 7, 16, 31, 32, 33, 200)) for _ in range(generator.randrange(1, 90))]
        contexts = [generator.choice((0, 3, 64)) for _ in query_lens]
        rows = rows_of(listed(query_lens, contexts, tokens=tokens, first=first, padding=generator.randrange(50)))
        starts = [*accumulate(query_lens, initial=first)]
        wanted = [
            WorkRow(request, starts[request], query_len, first_token, query_len + contexts[request])
            for request, query_len in enumerate(query_lens)
            for first_token in range(0, query_len, tokens)
        ]
        assert sorted(rows) == wanted
        assert all(last_key(one, tokens) >= last_key(other, tokens) for one, other in pairwise(rows))


def test_equal_tiles_keep_the_order_of_their_requests() -> None:
    rows = rows_of(listed([8, 8, 8], [0, 0, 0], tokens=16))
    assert [row.request for row in rows] == [0, 1, 2]


def test_queries_without_keys_are_listed_because_their_output_is_written() -> None:
    starts, lens = torch.tensor([0, 4, 20], dtype=torch.int32), torch.tensor([4, 0], dtype=torch.int32)
    rows = rows_of(list_work(starts.to(DEVICE), lens.to(DEVICE), num_tokens=20, tokens=16, num_programs=4))
    assert rows == [WorkRow(0, 0, 4, 0, 4), WorkRow(1, 4, 16, 0, 0)]


def test_a_batch_without_queries_has_no_tiles() -> None:
    assert rows_of(listed([0, 0], [5, 9], tokens=32)) == []
