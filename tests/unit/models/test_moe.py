"""Experts as batched tensors against one product per token and choice; when shared ones are computed with them."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import silu

from baton.models.config.model_config import MoEConfig, Scoring, TopKMethod
from baton.models.formats.fp8 import E4M3
from baton.models.kernels.matmul.decode_matmul import DecodeMultiply, new_counters
from baton.models.layers.mlp import GatedMLP, gelu_tanh_and_multiply
from baton.models.layers.moe.experts import Experts
from baton.models.layers.moe.moe import MoE
from baton.models.layers.products import make_batch_invariant

SIZE = 8


def layer_with_shared(shared_size: int, *, dtype: torch.dtype = torch.bfloat16) -> MoE:
    moe = MoEConfig(
        layers=(True,),
        num_experts=4,
        experts_per_token=2,
        intermediate_size=6,
        shared_intermediate_size=shared_size,
        scoring=Scoring.SOFTMAX,
        method=TopKMethod.GREEDY,
        num_groups=1,
        groups_per_token=1,
        normalize_weights=False,
        weight_scale=1.0,
    )
    return MoE(SIZE, moe, dtype=dtype)


def mlp_of(layer: MoE) -> GatedMLP:
    assert layer.shared_experts is not None
    return layer.shared_experts


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


@pytest.mark.parametrize("shared_size", [6, 12])
def test_shared_experts_of_few_tokens_are_computed_with_the_chosen_ones(shared_size: int) -> None:
    layer = layer_with_shared(shared_size)
    mlp = mlp_of(layer)
    for _ in range(2):
        shared = layer.shared_weights(1)
        assert shared is not None
        assert shared.gate_up_NC is mlp.gate_up_proj.weight
        assert shared.down_NC is mlp.down_proj.weight
        mlp.down_proj.multiply = DecodeMultiply(new_counters(mlp.down_proj.weight), 132)
    assert layer.shared_weights(1000) is None


def test_batch_invariant_shared_experts_are_computed_with_the_chosen_ones_whatever_the_number_of_tokens() -> None:
    layer = layer_with_shared(12)
    make_batch_invariant(layer)
    assert layer.shared_weights(1) is not None
    assert layer.shared_weights(1000) is not None


def test_large_shared_experts_are_computed_by_themselves() -> None:
    small = layer_with_shared(12).gate.moe
    with torch.device("meta"):
        for size, whole in ((2048, True), (8192, False)):
            moe = replace(small, intermediate_size=1024, shared_intermediate_size=2048)
            assert (MoE(size, moe, dtype=torch.bfloat16).shared_weights(1) is not None) is whole


def with_bias(layer: MoE) -> None:
    layer.shared_experts = GatedMLP(SIZE, 12, dtype=torch.bfloat16, bias=True)


def with_another_activation(layer: MoE) -> None:
    mlp_of(layer).activate = gelu_tanh_and_multiply


def with_another_product(layer: MoE) -> None:
    mlp_of(layer).gate_up_proj.multiply = lambda x, weight, bias: x @ weight.t()


@pytest.mark.parametrize("change", [with_bias, with_another_activation, with_another_product])
def test_shared_experts_that_are_computed_otherwise_are_computed_by_themselves(change: Callable[[MoE], None]) -> None:
    layer = layer_with_shared(12)
    assert layer.shared_weights(1) is not None
    change(layer)
    assert layer.shared_weights(1) is None


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("experts", "gate_up_proj"),
        ("experts", "down_proj"),
        ("shared_experts.gate_up_proj", "weight"),
        ("shared_experts.down_proj", "weight"),
    ],
)
def test_with_weights_in_fp8_shared_experts_are_computed_by_themselves(owner: str, name: str) -> None:
    layer = layer_with_shared(12)
    module = layer.get_submodule(owner)
    setattr(module, name, nn.Parameter(module.get_parameter(name).to(E4M3), requires_grad=False))
    assert layer.shared_weights(1) is None


def test_shared_experts_of_another_size_or_in_float32_are_computed_by_themselves() -> None:
    assert layer_with_shared(9).shared_weights(1) is None
    assert layer_with_shared(3).shared_weights(1) is None
    assert layer_with_shared(0).shared_weights(1) is None
    assert layer_with_shared(12, dtype=torch.float32).shared_weights(1) is None
