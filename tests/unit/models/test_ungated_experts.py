"""The kernel of experts without a gate equals its twin."""

import pytest
import torch
from torch import nn

from baton.models.layers.moe.ungated_experts import SquaredReluExperts
from tests.device import DEVICE


@pytest.mark.parametrize("num_tokens", [1, 7, 150])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_equals_its_twin(dtype: torch.dtype, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    experts = SquaredReluExperts(6, 40, 72, dtype=dtype).requires_grad_(requires_grad=False)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    x_TC = torch.randn(num_tokens, 40, generator=generator).to(dtype)
    weights_TK = torch.rand(num_tokens, 3, generator=generator)
    experts_TK = torch.rand(num_tokens, 6, generator=generator).topk(3).indices
    expected_TC = experts(x_TC, weights_TK, experts_TK).float()
    ours_TC = experts.to(DEVICE).run_grouped(x_TC.to(DEVICE), weights_TK.to(DEVICE), experts_TK.to(DEVICE))
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-6}[dtype]
    size = float(expected_TC.abs().max())
    assert float((ours_TC.cpu().float() - expected_TC).abs().max()) < tolerance * size
