"""Experts as batched tensors against one product per token and choice."""

import torch
from torch.nn.functional import silu

from models.moe import Experts


def test_experts_equal_one_product_per_choice() -> None:
    torch.manual_seed(0)
    experts = Experts(5, 8, 6, dtype=torch.float64)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    x_TD, weights_TK = torch.randn(7, 8, dtype=torch.float64), torch.rand(7, 2, dtype=torch.float64)
    experts_TK = torch.rand(7, 4).topk(2).indices  # expert 4 gets no token
    expected = torch.zeros_like(x_TD)
    for token, chosen in enumerate(experts_TK.tolist()):
        for choice, expert in enumerate(chosen):
            gate, up = (experts.gate_up_proj[expert] @ x_TD[token]).chunk(2)
            out = experts.down_proj[expert] @ (silu(gate) * up)
            expected[token] += weights_TK[token, choice] * out
    torch.testing.assert_close(experts(x_TD, weights_TK, experts_TK), expected)


def test_a_tokens_result_depends_on_no_other_token_but_for_rounding() -> None:
    torch.manual_seed(0)
    experts = Experts(4, 8, 6, dtype=torch.float64)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    x_TD, weights_TK = torch.randn(9, 8, dtype=torch.float64), torch.rand(9, 2, dtype=torch.float64)
    experts_TK = torch.rand(9, 4).topk(2).indices
    together = experts(x_TD, weights_TK, experts_TK)
    for token in range(9):
        row = slice(token, token + 1)
        torch.testing.assert_close(experts(x_TD[row], weights_TK[row], experts_TK[row]), together[row])


def test_an_empty_batch_has_an_empty_result() -> None:
    experts = Experts(4, 8, 6, dtype=torch.float64)
    out_TD = experts(torch.empty(0, 8, dtype=torch.float64), torch.empty(0, 2), torch.empty(0, 2, dtype=torch.int64))
    assert out_TD.shape == (0, 8)
