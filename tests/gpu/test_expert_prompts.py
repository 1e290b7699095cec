"""The experts of prompts on Hopper equal the products of each expert, in tiles of each size: experts with no tokens,
with few, with many, and experts of other ranks.
"""

import pytest
import torch
from torch import Tensor

from baton.models.formats import fp8
from baton.models.kernels.moe.expert_weights import ExpertWeights
from baton.models.kernels.moe.grouped_gemm import run_gated_experts
from baton.models.kernels.moe.grouped_prompts import FP8, THREE_GROUPS, TWO_GROUPS, PromptTile, multiply, run
from baton.models.kernels.moe.prompts_probe import compare_on_hopper, multiply_in_torch
from baton.tritonlib.hopper_check import LARGEST_DIFFERENCE, is_hopper
from tests.conformance.attention.oracle import relative_error

pytestmark = pytest.mark.gpu

CHOICES, EXPERTS = 4, 12


@pytest.fixture(autouse=True)
def hopper() -> None:
    if not is_hopper(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU")


def layers(size: int, intermediate: int, *, is_fp8: bool = False) -> tuple[ExpertWeights, ExpertWeights]:
    torch.manual_seed(0)
    made = []
    for outputs, inputs in ((2 * intermediate, size), (size, intermediate)):
        weights_ENC = torch.randn(EXPERTS, outputs, inputs, device="cuda")
        if is_fp8:
            scales = torch.rand(EXPERTS, outputs // 128, inputs // 128, device="cuda") * 0.05 + 0.02
            made.append(ExpertWeights(weights_ENC.to(fp8.E4M3), scales=scales))
        else:
            made.append(ExpertWeights(weights_ENC.mul_(0.05).bfloat16()))
    gate_up, down = made
    return gate_up, down


def routing(num_tokens: int) -> tuple[Tensor, Tensor]:
    """Each token's weights and experts: the last expert has no token, the first one has most."""
    torch.manual_seed(num_tokens)
    scores_TE = torch.rand(num_tokens, EXPERTS, device="cuda") + torch.linspace(3.0, 0.0, EXPERTS, device="cuda")
    scores_TE[:, -1] = -1.0
    return torch.rand(num_tokens, CHOICES, device="cuda"), scores_TE.topk(CHOICES).indices


@pytest.mark.parametrize("tile", [TWO_GROUPS, THREE_GROUPS, FP8], ids=["two groups", "three groups", "fp8"])
@pytest.mark.parametrize(("num_tokens", "size", "intermediate"), [(2, 128, 128), (333, 512, 384), (1501, 2048, 1408)])
def test_each_assignment_gets_the_product_of_its_expert(
    num_tokens: int, size: int, intermediate: int, tile: PromptTile
) -> None:
    gate_up, down = layers(size, intermediate, is_fp8=tile is FP8)
    weights_TK, experts_TK = routing(num_tokens)
    x_TD = torch.randn(num_tokens, size, device="cuda").bfloat16()
    parts_SD = multiply(x_TD, weights_TK, experts_TK, gate_up, down, tile)
    expected_SD = multiply_in_torch(x_TD, weights_TK, experts_TK, gate_up, down)
    assert relative_error(parts_SD, expected_SD) < 0.01
    errors_S = (parts_SD.float() - expected_SD).norm(dim=1) / expected_SD.norm(dim=1)
    assert errors_S.max() < 0.03


@pytest.mark.parametrize("is_fp8", [False, True])
def test_experts_of_other_ranks_are_left_out_and_rows_may_have_gaps(*, is_fp8: bool) -> None:
    gate_up, down = layers(512, 256, is_fp8=is_fp8)
    weights_TK, experts_TK = routing(900)
    experts_TK = torch.where(experts_TK % 3 == 0, -1, experts_TK)
    x_TD = torch.randn(900, 1024, device="cuda").bfloat16()[:, :512]
    assert run(x_TD, weights_TK, experts_TK, gate_up, down, of=EXPERTS) is not None
    actual_TD = run_gated_experts(x_TD, weights_TK, experts_TK, gate_up, down, of=EXPERTS)
    expected_SD = multiply_in_torch(x_TD, weights_TK, experts_TK, gate_up, down)
    assert relative_error(actual_TD, expected_SD.unflatten(0, (900, CHOICES)).sum(1)) < 0.01


def test_the_comparison_for_other_versions_of_triton_passes() -> None:
    for actual, expected in compare_on_hopper(torch.device("cuda")):
        difference = (actual.float() - expected).abs().max() / expected.abs().max()
        assert difference < LARGEST_DIFFERENCE
