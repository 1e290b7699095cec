"""Mixtures of experts on a GPU at the sizes of DeepSeek-V2-Lite, some with V3's experts: equal to the products of each
expert in float32, no wait for the device, captured once and replayed with other tokens, and the same bits in any batch.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from baton.models.config.model_config import MoEConfig, Scoring, TopKMethod
from baton.models.layers.moe.experts import Experts
from baton.models.layers.moe.moe import MoE
from baton.models.layers.moe.router import Router
from tests.conformance.attention.oracle import relative_error
from tests.gpu.waiting import no_waiting

pytestmark = pytest.mark.gpu

SIZE = 2048
V2_LITE = MoEConfig(
    layers=(True,),
    num_experts=64,
    experts_per_token=6,
    intermediate_size=1408,
    shared_intermediate_size=2816,
    scoring=Scoring.SOFTMAX,
    method=TopKMethod.GREEDY,
    num_groups=1,
    groups_per_token=1,
    normalize_weights=False,
    weight_scale=1.0,
)
V3_ROUTING = MoEConfig(
    layers=(True,),
    num_experts=256,
    experts_per_token=8,
    intermediate_size=2048,
    shared_intermediate_size=2048,
    scoring=Scoring.SIGMOID,
    method=TopKMethod.NOAUX_TC,
    num_groups=8,
    groups_per_token=4,
    normalize_weights=True,
    weight_scale=2.5,
)


def make_layer(moe: MoEConfig) -> MoE:
    torch.manual_seed(0)
    with torch.device("cuda"):
        layer = MoE(SIZE, moe, dtype=torch.bfloat16).requires_grad_(False)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.02)
    return layer


@pytest.fixture(scope="module")
def layer() -> MoE:
    return make_layer(V2_LITE)


@pytest.fixture(scope="module", params=["v2-lite", "v3"])
def either_layer(request: pytest.FixtureRequest) -> MoE:
    if request.param == "v3":
        return make_layer(replace(V3_ROUTING, num_experts=32))
    v2_lite: MoE = request.getfixturevalue("layer")
    return v2_lite


def tokens(num_tokens: int, *, seed: int = 1) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(num_tokens, SIZE, device="cuda", dtype=torch.bfloat16)


def one_expert(layer: MoE, expert: int, x_TD: Tensor) -> Tensor:
    """In float32."""
    gate_TI, up_TI = (x_TD.float() @ layer.experts.gate_up_proj[expert].float().t()).chunk(2, dim=1)
    return (silu(gate_TI) * up_TI) @ layer.experts.down_proj[expert].float().t()


def reference(layer: MoE, x_TD: Tensor) -> Tensor:
    """Every expert over every token, weighted by 0 where it was not chosen, plus the shared experts, in float32."""
    weights_TK, experts_TK = layer.gate(x_TD)
    num_experts = len(layer.experts.gate_up_proj)
    weights_TE = x_TD.new_zeros(len(x_TD), num_experts, dtype=torch.float32)
    weights_TE.scatter_(1, experts_TK.long(), weights_TK)
    assert layer.shared_experts is not None
    gate_TI, up_TI = (x_TD.float() @ layer.shared_experts.gate_up_proj.weight.float().t()).chunk(2, dim=1)
    out_TD = (silu(gate_TI) * up_TI) @ layer.shared_experts.down_proj.weight.float().t()
    for expert in range(num_experts):
        out_TD += weights_TE[:, expert, None] * one_expert(layer, expert, x_TD)
    return out_TD


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 100, 256, 1000, 3000, 4100])
def test_every_path_equals_the_products_of_each_expert(layer: MoE, num_tokens: int) -> None:
    x_TD = tokens(num_tokens)
    assert relative_error(layer(x_TD), reference(layer, x_TD)) < 0.01


@pytest.mark.parametrize("num_tokens", [1, 8, 32, 96])
def test_shared_experts_are_computed_with_the_chosen_ones(either_layer: MoE, num_tokens: int) -> None:
    x_TD = tokens(num_tokens)
    assert either_layer.shared_weights(num_tokens) is not None
    assert relative_error(either_layer(x_TD), reference(either_layer, x_TD)) < 0.01


def test_few_experts_take_all_tokens(layer: MoE) -> None:
    x_TD = tokens(700)
    weights_TK = torch.rand(700, 6, device="cuda")
    experts_TK = torch.tensor([[63, 0, 5, 7, 8, 62]], device="cuda").repeat(700, 1)
    expected = torch.zeros(700, SIZE, device="cuda")
    for choice, expert in enumerate((63, 0, 5, 7, 8, 62)):
        expected += weights_TK[:, choice, None] * one_expert(layer, expert, x_TD)
    assert relative_error(layer.experts(x_TD, weights_TK, experts_TK), expected) < 0.01


@pytest.mark.parametrize("moe", [V2_LITE, V3_ROUTING], ids=["v2-lite", "v3"])
@pytest.mark.parametrize("num_tokens", [1, 33, 2000, 5000])
@pytest.mark.parametrize("rounded", [False, True])
def test_the_router_chooses_as_on_a_cpu(moe: MoEConfig, num_tokens: int, rounded: bool) -> None:
    torch.manual_seed(0)
    router = Router(SIZE, moe).requires_grad_(False)
    for parameter in router.parameters():
        nn.init.normal_(parameter, std=0.02)
    if rounded:
        router.weight.copy_(router.weight.bfloat16())
    x_TD = tokens(num_tokens)
    weights_TK, experts_TK = router(x_TD.cpu())
    router.to("cuda").process_weights_after_loading()
    assert (router.exact_ED is not None) == rounded
    actual_TK, actual_experts_TK = router(x_TD)
    same_T = (actual_experts_TK.cpu().sort(1).values == experts_TK.sort(1).values).all(1)
    assert same_T.float().mean() > 0.998  # scores may be closer than float32 can resolve
    torch.testing.assert_close(actual_TK.cpu().sum(1)[same_T], weights_TK.sum(1)[same_T], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [1, 40, 1500])
def test_the_host_never_waits(layer: MoE, num_tokens: int) -> None:
    x_TD = tokens(num_tokens)
    layer(x_TD)
    torch.cuda.synchronize()
    with no_waiting():
        layer(x_TD)


@pytest.mark.parametrize("num_tokens", [1, 8, 32, 64, 128])
def test_a_captured_layer_serves_other_tokens(either_layer: MoE, num_tokens: int) -> None:
    x_TD = tokens(num_tokens)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        either_layer(x_TD)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_TD = either_layer(x_TD)
    for seed in (2, 3):
        x_TD.copy_(tokens(num_tokens, seed=seed))
        graph.replay()
        assert torch.equal(out_TD, either_layer(x_TD))
        assert relative_error(out_TD, reference(either_layer, x_TD)) < 0.01


@pytest.mark.parametrize("num_tokens", [33, 1100])
def test_batch_invariant_experts_give_a_token_the_same_bits_in_any_batch(layer: MoE, num_tokens: int) -> None:
    x_TD = tokens(num_tokens)
    routed: tuple[Router, Experts] = layer.gate, layer.experts
    for module in routed:
        module.batch_invariant = True
    try:
        together_TD = layer.experts(x_TD, *layer.gate(x_TD))
        for rows in (slice(0, 1), slice(5, 6), slice(7, 31)):
            alone_TD = layer.experts(x_TD[rows], *layer.gate(x_TD[rows]))
            assert torch.equal(alone_TD, together_TD[rows])
    finally:
        for module in routed:
            module.batch_invariant = False


@pytest.mark.parametrize("num_tokens", [1, 20, 200])
def test_a_gate_scales_the_shared_experts(num_tokens: int) -> None:
    layer = make_layer(replace(V2_LITE, shared_gate=True))
    x_TD = torch.randn(num_tokens, SIZE, device="cuda", dtype=torch.bfloat16)
    assert layer.shared_experts is not None
    assert layer.shared_expert_gate is not None
    gate_T1 = torch.sigmoid(x_TD.float() @ layer.shared_expert_gate.weight.float().t())
    shared_TD = layer.shared_experts(x_TD).float() * gate_T1
    expected_TD = layer.experts(x_TD, *layer.gate(x_TD)).float() + shared_TD
    assert relative_error(layer(x_TD), expected_TD) < 0.01
    assert relative_error(layer(x_TD), expected_TD - shared_TD) > 0.05
