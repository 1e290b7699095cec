"""The kernels of mixtures of experts equal their twins: a sort, and the routers and experts of a CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from baton.models.config.model_config import MoEConfig, Scoring, TopKMethod
from baton.models.families.dense.gemma4 import Gemma4Experts
from baton.models.families.moe.gpt_oss import GptOssExperts
from baton.models.families.moe.gpt_oss_config import GptOssSwitches
from baton.models.families.moe.llama4 import Llama4Experts
from baton.models.kernels.moe.expert_choice import choose_experts
from baton.models.kernels.moe.expert_order import num_tiles_max, order_by_expert, sort_assignments
from baton.models.kernels.moe.expert_weights import ExpertWeights
from baton.models.kernels.moe.grouped_gemm import SharedWeights
from baton.models.kernels.moe.grouped_prompts import choose_tile
from baton.models.kernels.moe.grouped_tiles import tiles_for
from baton.models.kernels.moe.prompts_probe import multiply_in_torch
from baton.models.kernels.moe.routing import route, router_logits
from baton.models.layers.mlp import GatedMLP
from baton.models.layers.moe.experts import Experts
from baton.models.layers.moe.router import Router
from baton.tritonlib.hopper_check import is_hopper
from tests.device import DEVICE

GPT_OSS = GptOssSwitches(swiglu_limit=1.5, swiglu_alpha=1.7)


def moe(
    num_experts: int,
    experts_per_token: int,
    *,
    intermediate_size: int = 20,
    scoring: Scoring = Scoring.SOFTMAX,
    method: TopKMethod = TopKMethod.GREEDY,
    groups: tuple[int, int] = (1, 1),
    router_bias: bool = False,
) -> MoEConfig:
    return MoEConfig(
        layers=(True,),
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        intermediate_size=intermediate_size,
        shared_intermediate_size=0,
        scoring=scoring,
        method=method,
        num_groups=groups[0],
        groups_per_token=groups[1],
        normalize_weights=True,
        weight_scale=2.5,
        router_bias=router_bias,
        mixer_threshold=0.4,
    )


def filled(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.requires_grad_(False)


def chosen(num_tokens: int, num_experts: int, experts_per_token: int) -> Tensor:
    return torch.rand(num_tokens, num_experts).topk(experts_per_token).indices


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative error in the Euclidean norm."""
    return float((actual.cpu().double() - expected.double()).norm() / expected.double().norm())


def run(
    experts: Experts | Llama4Experts | GptOssExperts | Gemma4Experts,
    x_TD: Tensor,
    experts_TK: Tensor,
    *,
    weights_TK: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """(result of the kernels, result of a CPU in float32)"""
    if weights_TK is None:
        weights_TK = torch.rand(experts_TK.shape)
    on_device = {name: option.to(DEVICE) for name, option in options.items()}
    experts.to(DEVICE)
    actual = experts.run_grouped(x_TD.to(DEVICE), weights_TK.to(DEVICE), experts_TK.to(DEVICE), **on_device)
    experts.cpu()
    if experts.gate_up_proj.dtype != torch.float8_e4m3fn:
        experts.float()
    expected = experts(x_TD.float(), weights_TK, experts_TK, **{name: t.float() for name, t in options.items()})
    return actual, expected


# ---- the order


@pytest.mark.parametrize(
    ("num_assignments", "num_experts", "tile_tokens"), [(7, 5, 16), (300, 64, 16), (300, 3, 32), (4500, 60, 64)]
)
def test_assignments_are_sorted_and_cut_into_tiles_of_one_expert(
    num_assignments: int, num_experts: int, tile_tokens: int
) -> None:
    torch.manual_seed(0)
    experts_S = torch.randint(num_experts, (num_assignments,))
    order = sort_assignments(experts_S.to(DEVICE).unsqueeze(1), num_experts=num_experts, tile_tokens=tile_tokens)
    assert order.order_P is not None
    assert torch.equal(order.order_P.cpu().long(), experts_S.argsort(stable=True))
    expected, first = [], 0
    for expert, count in enumerate(experts_S.bincount(minlength=num_experts).tolist()):
        expected += [[expert, first + start, first + count] for start in range(0, count, tile_tokens)]
        first += count
    tiles = order.tiles_3L.t().tolist()
    assert tiles[: len(expected)] == expected
    assert all(expert == -1 for expert, _, _ in tiles[len(expected) :])


def test_the_tiles_that_the_host_counts_on_suffice_for_any_choice_and_are_needed_for_some() -> None:
    for num_assignments, num_experts, tile_tokens in ((1, 4, 16), (5, 4, 16), (70, 4, 16), (64, 64, 16), (7, 2, 2)):
        # The worst: one token for each expert, then one more than full tiles for each.
        counts = [0] * num_experts
        left = num_assignments
        for expert in range(min(num_experts, left)):
            counts[expert], left = 1, left - 1
        counts[0] += left // tile_tokens * tile_tokens
        counts[-1] += left % tile_tokens
        needed = sum(-(-count // tile_tokens) for count in counts)
        most = num_tiles_max(num_assignments, num_experts, tile_tokens)
        assert needed <= most <= needed + 1


def test_one_token_needs_no_order() -> None:
    experts_TK = torch.tensor([[4, 2]], device=DEVICE)
    order = order_by_expert(experts_TK, num_experts=6, tile_tokens=16)
    assert order.order_P is None
    assert order.num_tiles == 2


# ---- the router


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("scoring", list(Scoring))
@pytest.mark.parametrize(
    ("method", "groups"),
    [
        (TopKMethod.GREEDY, (1, 1)),
        (TopKMethod.GROUP_LIMITED_GREEDY, (3, 2)),
        (TopKMethod.NOAUX_TC, (4, 2)),
        (TopKMethod.NOAUX_TC, (1, 1)),
        (TopKMethod.SPARSE_MIXER, (1, 1)),
    ],
)
def test_the_same_experts_are_chosen(
    method: TopKMethod, groups: tuple[int, int], scoring: Scoring, batch_invariant: bool
) -> None:
    torch.manual_seed(0)
    router = Router(300, moe(48, 3, scoring=scoring, method=method, groups=groups, router_bias=True))
    filled(router)
    x_TD = torch.randn(5, 300)
    weights_TK, experts_TK = router(x_TD)
    router.to(DEVICE)
    actual_TK, actual_experts_TK = route(
        x_TD.to(DEVICE),
        router.weight,
        router.choice,
        bias_E=router.bias,
        correction_E=router.e_score_correction_bias,
        batch_invariant=batch_invariant,
    )
    assert torch.equal(actual_experts_TK.cpu().long(), experts_TK)
    torch.testing.assert_close(actual_TK.cpu(), weights_TK, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_half_precision_inputs_lose_nothing(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x_TD, weight_ED = torch.randn(5, 300).bfloat16(), torch.randn(20, 300).to(dtype)
    for short_parts in (False, True):
        logits_TE = router_logits(x_TD.to(DEVICE), weight_ED.to(DEVICE), short_parts=short_parts).sum(0)
        assert error(logits_TE, x_TD.double() @ weight_ED.double().t()) < 1e-6


def test_a_router_is_read_in_16_bits_only_if_that_loses_nothing() -> None:
    router = Router(300, moe(48, 3)).requires_grad_(requires_grad=False)
    router.weight.copy_(torch.randn(48, 300).bfloat16())
    router.process_weights_after_loading()
    assert router.exact_ED is not None
    assert torch.equal(router.exact_ED.float(), router.weight)
    router.weight[7, 11] = 1 + 2.0**-12
    router.process_weights_after_loading()
    assert router.exact_ED is None


@pytest.mark.parametrize("num_tokens", [1, 20])
def test_another_gate_is_computed_with_the_logits(num_tokens: int) -> None:
    torch.manual_seed(0)
    router = Router(300, moe(48, 3))
    filled(router)
    x_TD, gate_1D = torch.randn(num_tokens, 300).bfloat16(), torch.randn(1, 300).bfloat16()
    weights_TK, experts_TK = router(x_TD)
    router.to(DEVICE)
    *actual, gates_T = router.with_gate(x_TD.to(DEVICE), gate_1D.to(DEVICE))
    torch.testing.assert_close(gates_T.cpu(), (x_TD.float() @ gate_1D[0].float()).sigmoid(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(actual[0].cpu(), weights_TK, rtol=1e-5, atol=1e-6)
    assert torch.equal(actual[1].cpu().long(), experts_TK)


def test_of_equal_experts_the_first_are_taken_and_no_number_breaks_only_its_own_token() -> None:
    choice = Router(8, moe(6, 2, scoring=Scoring.SIGMOID, method=TopKMethod.NOAUX_TC, groups=(2, 1))).choice
    logits_PTE = torch.zeros(1, 3, 6)
    logits_PTE[0, 1] = torch.nan
    logits_PTE[0, 2, 5] = 1.0
    weights_TK, experts_TK = choose_experts(
        logits_PTE.to(DEVICE), choice, bias_E=None, correction_E=torch.zeros(6, device=DEVICE)
    )
    assert experts_TK[0].tolist() == [0, 1]
    assert 0 <= int(experts_TK[1].min()) <= int(experts_TK[1].max()) < 6
    assert experts_TK[2].tolist() == [5, 3]
    assert weights_TK[[0, 2]].isfinite().all()


# ---- the products


@pytest.mark.parametrize("num_tokens", [0, 1, 20])
def test_experts_equal_those_of_a_cpu(num_tokens: int) -> None:
    torch.manual_seed(0)
    experts = Experts(5, 40, 36, dtype=torch.float32)
    filled(experts)
    x_TD = torch.randn(num_tokens, 40)
    actual, expected = run(experts, x_TD, chosen(num_tokens, 5, 2), plus_TD=torch.randn(num_tokens, 40))
    assert actual.shape == expected.shape
    assert not num_tokens or error(actual, expected) < 1e-6


def test_all_tokens_may_want_the_same_experts() -> None:
    torch.manual_seed(0)
    experts = Experts(6, 16, 8, dtype=torch.float32)
    filled(experts)
    actual, expected = run(experts, torch.randn(18, 16), torch.tensor([[4, 1]]).repeat(18, 1))
    assert error(actual, expected) < 1e-6


def test_sizes_that_do_not_suit_the_copy_engine() -> None:
    torch.manual_seed(0)
    experts = Experts(4, 10, 6, dtype=torch.float32)
    filled(experts)
    actual, expected = run(experts, torch.randn(7, 10), chosen(7, 4, 2))
    assert error(actual, expected) < 1e-6


@pytest.mark.parametrize(("num_tokens", "tile_tokens"), [(1, 16), (14, 32), (28, 64), (50, 128)])
def test_tiles_of_every_size_in_half_precision_equal_their_twin(num_tokens: int, tile_tokens: int) -> None:
    torch.manual_seed(0)
    tiles = tiles_for(
        num_assignments=num_tokens * 2, num_experts=2, dtype=torch.bfloat16, fp8=False, batch_invariant=False
    )
    assert tiles.gate_up.tokens == tiles.down.tokens == tile_tokens
    experts = Experts(2, 72, 40, dtype=torch.bfloat16)
    filled(experts)
    actual, expected = run(experts, torch.randn(num_tokens, 72).bfloat16(), chosen(num_tokens, 2, 2))
    assert error(actual, expected) < 0.015


@pytest.mark.parametrize("num_shared", [1, 2])
@pytest.mark.parametrize(
    ("size", "intermediate_size", "num_tokens", "dtype", "bound"),
    [
        *((40, 36, num_tokens, torch.float32, 1e-6) for num_tokens in (0, 1, 5, 20)),
        (10, 6, 20, torch.float32, 1e-6),  # does not suit the copy engine
        *((136, 72, num_tokens, torch.bfloat16, 0.015) for num_tokens in (1, 20, 90)),
    ],
)
def test_shared_experts_run_together_with_the_chosen_ones(
    size: int, intermediate_size: int, num_tokens: int, dtype: torch.dtype, bound: float, num_shared: int
) -> None:
    torch.manual_seed(0)
    experts = Experts(3, size, intermediate_size, dtype=dtype)
    mlp = GatedMLP(size, num_shared * intermediate_size, dtype=dtype)
    filled(experts).to(DEVICE)
    filled(mlp).to(DEVICE)
    x_TD, experts_TK = torch.randn(num_tokens, size).to(dtype), chosen(num_tokens, 3, 2)
    weights_TK = torch.rand(num_tokens, 2)
    shared = SharedWeights(mlp.gate_up_proj.weight, mlp.down_proj.weight)
    actual = experts.run_grouped(x_TD.to(DEVICE), weights_TK.to(DEVICE), experts_TK.to(DEVICE), shared=shared)
    assert actual.shape == x_TD.shape
    x_TD = x_TD.float()
    expected = experts.cpu().float()(x_TD, weights_TK, experts_TK, plus_TD=mlp.cpu().float()(x_TD))
    assert not num_tokens or error(actual, expected) < bound


@pytest.mark.parametrize(("num_tokens", "dtype", "bound"), [(2, torch.bfloat16, 0.015), (20, torch.float32, 1e-6)])
def test_shared_experts_have_a_factor_for_each_token(num_tokens: int, dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(0)
    experts, mlp = Experts(16, 40, 24, dtype=dtype), GatedMLP(40, 48, dtype=dtype)
    filled(experts).to(DEVICE)
    filled(mlp).to(DEVICE)
    x_TD, experts_TK = torch.randn(num_tokens, 40).to(dtype), chosen(num_tokens, 16, 2)
    weights_TK, gates_T = torch.rand(num_tokens, 2), torch.rand(num_tokens)
    shared = SharedWeights(mlp.gate_up_proj.weight, mlp.down_proj.weight, gates_T.to(DEVICE))
    actual = experts.run_grouped(x_TD.to(DEVICE), weights_TK.to(DEVICE), experts_TK.to(DEVICE), shared=shared)
    x_TD = x_TD.float()
    shared_TD = mlp.cpu().float()(x_TD) * gates_T[:, None]
    assert error(actual, experts.cpu().float()(x_TD, weights_TK, experts_TK, plus_TD=shared_TD)) < bound


@pytest.mark.parametrize("num_tokens", [1, 9])
def test_inputs_first_and_weights_on_the_input_equal_their_twin(num_tokens: int) -> None:
    torch.manual_seed(0)
    experts = Llama4Experts(4, 24, 20, dtype=torch.float32)
    filled(experts)
    x_TD, plus_TD = torch.randn(2, num_tokens, 24)
    actual, expected = run(experts, x_TD, chosen(num_tokens, 4, 2), plus_TD=plus_TD)
    assert error(actual, expected) < 1e-6


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 0.015)])
def test_gelu_equals_its_twin(dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(0)
    experts = Gemma4Experts(24, moe(4, 2), dtype=dtype)
    filled(experts)
    actual, expected = run(experts, torch.randn(9, 24).to(dtype), chosen(9, 4, 2))
    assert error(actual, expected) < bound


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 0.015)])
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_interleaved_gates_with_biases_and_a_clamp_equal_their_twin(
    num_tokens: int, dtype: torch.dtype, bound: float
) -> None:
    torch.manual_seed(0)
    experts = GptOssExperts(24, moe(4, 2, intermediate_size=40), GPT_OSS, dtype=dtype)
    filled(experts)
    actual, expected = run(experts, torch.randn(num_tokens, 24).to(dtype), chosen(num_tokens, 4, 2))
    assert error(actual, expected) < bound


@pytest.mark.parametrize(
    ("size", "intermediate_size", "num_tokens", "dtype", "bound"),
    [
        (136, 32, 3, torch.float32, 1e-6),
        (136, 256, 3, torch.bfloat16, 0.015),
        (256, 128, 40, torch.bfloat16, 0.015),
    ],
)
def test_fp8_weights_are_scaled_by_blocks(
    size: int, intermediate_size: int, num_tokens: int, dtype: torch.dtype, bound: float
) -> None:
    torch.manual_seed(0)
    experts = Experts(2, size, intermediate_size, dtype=torch.float32)
    rows, columns = -(-intermediate_size // 128), -(-size // 128)
    for name, blocks in (("gate_up_proj", (2 * rows, columns)), ("down_proj", (columns, rows))):
        numbers = torch.randn(getattr(experts, name).shape).to(torch.float8_e4m3fn)
        setattr(experts, name, nn.Parameter(numbers, requires_grad=False))
        scales = torch.rand(2, *blocks).mul_(0.2).add_(0.02)
        setattr(experts, f"{name}_scale_inv", nn.Parameter(scales, requires_grad=False))
    x_TD, experts_TK = torch.randn(num_tokens, size).to(dtype), chosen(num_tokens, 2, 2)
    weights_TK = torch.rand(experts_TK.shape)
    actual, expected = run(experts, x_TD, experts_TK, weights_TK=weights_TK)
    if is_hopper(torch.device(DEVICE)) and choose_tile(experts_TK.numel(), 2, size, is_fp8=True) is not None:
        # There the kernels for prompts round their inputs to fp8, as checkpoints with such weights expect.
        gate_up = ExpertWeights(experts.gate_up_proj, scales=experts.gate_up_proj_scale_inv)
        down = ExpertWeights(experts.down_proj, scales=experts.down_proj_scale_inv)
        parts_SD = multiply_in_torch(x_TD, weights_TK, experts_TK, gate_up, down)
        expected = parts_SD.unflatten(0, experts_TK.shape).sum(1)
    assert error(actual, expected) < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_invariant_experts_give_a_token_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    experts = Experts(3, 40, 24, dtype=dtype)
    filled(experts).to(DEVICE)
    experts.batch_invariant = True
    x_TD = torch.randn(12, 40).to(DEVICE, dtype)
    weights_TK, experts_TK = torch.rand(12, 2, device=DEVICE), chosen(12, 3, 2).to(DEVICE)
    together_TD = experts.run_grouped(x_TD, weights_TK, experts_TK)
    for rows in (slice(0, 1), slice(5, 12)):
        alone_TD = experts.run_grouped(x_TD[rows], weights_TK[rows], experts_TK[rows])
        assert torch.equal(alone_TD, together_TD[rows])
