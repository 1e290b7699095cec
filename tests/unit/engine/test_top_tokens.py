"""The most likely tokens: a stable order, whatever the number of rows."""

import pytest
import torch
from torch import Tensor

from baton.engine.sampling.top_tokens import top_tokens


def sorted_tokens(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    values, token_ids = logprobs.sort(dim=-1, descending=True, stable=True)
    return values[:, :count], token_ids[:, :count]


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("count", [1, 20, 300])
def test_equal_logprobs_are_ordered_by_token(rows: int, count: int) -> None:
    logits = torch.randn(rows, 300, generator=torch.Generator().manual_seed(3)).mul(3).bfloat16().float()
    logprobs = logits.log_softmax(dim=-1)
    assert logprobs[0].unique().numel() < 300
    values, token_ids = top_tokens(logprobs, count)
    expected_values, expected_ids = sorted_tokens(logprobs, count)
    torch.testing.assert_close(values, expected_values, rtol=0, atol=0)
    assert token_ids.tolist() == expected_ids.tolist()


def test_tokens_that_cannot_be_drawn_come_last() -> None:
    logprobs = torch.tensor([[-torch.inf, 0.0, -torch.inf, -0.0, -3e38, -1e-45]])
    values, token_ids = top_tokens(logprobs, 6)
    assert token_ids.tolist() == [[1, 3, 5, 4, 0, 2]]
    assert values.tolist() == [logprobs[0, token_ids[0]].tolist()]
