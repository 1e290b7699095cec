"""A model whose ranks hold whole experts equals the model on one rank, also where they hold unequal numbers of them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from baton.core.errors import ConfigError
from baton.models.config.model_config import MoEConfig, Scoring, TopKMethod
from baton.models.families.dense.gemma4 import Gemma4Experts
from baton.models.families.moe.gpt_oss import GptOssExperts, Mxfp4Experts
from baton.models.families.moe.gpt_oss_config import GptOssSwitches
from baton.models.families.moe.llama4 import Llama4Experts
from baton.models.families.reader import read_config
from baton.models.kernels.moe.expert_order import sort_assignments
from baton.models.layers.moe.experts import Experts, RoutedExperts
from baton.models.layers.parallel import TensorParallel, experts
from baton.models.loading.loader import checkpoint_views, load_model
from baton.models.loading.local_config import local_config
from baton.models.loading.shares import Shares
from tests.device import DEVICE
from tests.ranks import run_ranks
from tests.unit.models.fp8_checkpoints import by_block, save_fp8
from tests.unit.models.packed_checkpoints import packed_config, save_gpt_oss, save_packed
from tests.unit.models.paged import backend_for
from tests.unit.models.split import Run, run_model, run_split
from tests.unit.models.test_quantization import DEEPSEEK
from tests.unit.models.tiny import save_tiny

# Five experts (granite-moe, llama4, gemma4), nine (kimi-k2) and three (longcat) are shared unequally.
PLAIN = (
    "qwen3-moe",
    "deepseek-v3",
    "gpt-oss",
    "glm4-moe",
    "granite-moe",
    "llama4-all-experts-two-of-them-biases",
    "gemma4-experts",
    "kimi-k2",
    "longcat-yarn-most-experts-zero",
    "glm4-moe-lite",
    "dots1",
)
WIDE = {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
QUANTIZED: Mapping[str, Callable[[Path], Any]] = MappingProxyType(
    {
        "deepseek in fp8": lambda path: save_fp8(
            "DeepseekV3", path, by_block, DEEPSEEK, scale_name="weight_scale_inv", fields=WIDE
        ),
        "deepseek in w4a16": lambda path: save_packed("DeepseekV3", path, packed_config(symmetric=False)),
        "gpt-oss in mxfp4": save_gpt_oss,
    }
)
SIZES: Mapping[str, tuple[int, ...]] = MappingProxyType(dict.fromkeys((*PLAIN, *QUANTIZED), (2,)))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name in PLAIN:
        save_tiny(name, root / name)
    for name, save in QUANTIZED.items():
        save(root / name)
    return {name: root / name / "quantized" if name in QUANTIZED else root / name for name in SIZES}


@pytest.fixture(scope="module")
def together(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, int], Run]]:
    return run_ranks(run_split, 2, tmp_path_factory.mktemp("ranks"), models, dict(SIZES), frozenset(SIZES))


@pytest.mark.parametrize("name", SIZES)
def test_logits_are_those_of_the_whole_model(
    name: str, models: dict[str, Path], together: list[dict[tuple[str, int], Run]]
) -> None:
    alone, ours = run_model(models[name]), together[0][name, 2]
    expected = alone.logits
    assert float(expected.std()) > 0.1, "a reference without spread proves nothing"
    assert float((ours.logits - expected).abs().max()) < 1e-5 * max(1.0, float(expected.abs().max()))
    assert ours.tokens == alone.tokens
    assert torch.equal(together[1][name, 2].logits, ours.logits)


def test_each_expert_is_one_rank_s() -> None:
    for num_experts, size in ((256, 8), (9, 2), (5, 4), (128, 3)):
        held = [experts(num_experts, TensorParallel(rank, size)) for rank in range(size)]
        assert [expert for each in held for expert in each] == list(range(num_experts))
        assert max(map(len, held)) - min(map(len, held)) <= 1


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "llama4-all-experts-two-of-them-biases"])
def test_dummy_weights_are_parts_of_those_of_the_whole_model(name: str, models: dict[str, Path]) -> None:
    config = read_config(models[name])

    def views(parallel: TensorParallel) -> dict[str, Tensor]:
        backend = backend_for(local_config(config, parallel))
        common: dict[str, Any] = {"dtype": "float32", "device": "cpu", "load_format": "dummy", "parallel": parallel}
        return checkpoint_views(load_model(models[name], config, backend=backend, **common))

    whole, parallel = views(TensorParallel()), TensorParallel(1, 2, whole_experts=True)
    shares, own = Shares(config, parallel), views(parallel)
    assert {path for path in whole if shares.elsewhere(path)} == whole.keys() - own.keys()
    for path, view in own.items():
        share = shares.of(path)
        if ".experts." in path:
            held = whole[path] if share is None else whole[path][share.ranges[0].start : share.ranges[0].stop]
            assert torch.equal(view, held), path


def test_models_without_enough_experts_are_refused(models: dict[str, Path]) -> None:
    many = TensorParallel(0, 4, whole_experts=True)
    config = read_config(models["gpt-oss"])
    assert config.moe is not None
    few = replace(config, moe=replace(config.moe, num_experts=2))
    with pytest.raises(ConfigError, match="it has 2 experts") as refused:
        local_config(few, many)
    assert refused.value.allowed == ("1", "2")
    with pytest.raises(ConfigError, match="no experts to split"):
        local_config(replace(config, moe=None), many)
    with pytest.raises(ConfigError, match="an expert has 21 channels"):
        local_config(replace(config, moe=replace(config.moe, intermediate_size=21)), TensorParallel(0, 2))
    assert local_config(replace(config, moe=replace(config.moe, intermediate_size=21)), many).moe is not None


# ---- the kernels


def moe(own: range | None) -> MoEConfig:
    return MoEConfig(
        (True,),
        5,
        2,
        32,
        0,
        Scoring.SOFTMAX,
        TopKMethod.GREEDY,
        1,
        1,
        normalize_weights=True,
        weight_scale=1.0,
        own=own,
    )


OSS = GptOssSwitches(swiglu_limit=1.5, swiglu_alpha=1.7)
KINDS: Mapping[str, Callable[[range | None], RoutedExperts]] = MappingProxyType(
    {
        "plain": lambda own: Experts(5, 64, 32, dtype=torch.float32, held=own),
        "llama4": lambda own: Llama4Experts(5, 64, 32, dtype=torch.float32, held=own),
        "gemma4": lambda own: Gemma4Experts(64, moe(own), dtype=torch.float32),
        "gpt-oss": lambda own: GptOssExperts(64, moe(own), OSS, dtype=torch.float32),
        "mxfp4": lambda own: Mxfp4Experts(64, moe(own), OSS, dtype=torch.float32),
    }
)


@pytest.mark.parametrize("num_tokens", [1, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_the_sum_of_the_ranks_experts_is_that_of_all_on_a_gpu_as_on_a_cpu(kind: str, num_tokens: int) -> None:
    torch.manual_seed(0)
    whole = KINDS[kind](None)
    for name, parameter in whole.named_parameters():
        if parameter.is_floating_point():
            nn.init.normal_(parameter, std=0.3)
        else:
            low, high = (0, 256) if name.endswith("blocks") else (121, 125)
            parameter.data.copy_(torch.randint(low, high, parameter.shape))
    whole.requires_grad_(requires_grad=False)
    x_TD, weights_TK = torch.randn(num_tokens, 64), torch.rand(num_tokens, 2)
    experts_TK = torch.rand(num_tokens, 5).topk(2).indices
    expected = whole(x_TD, weights_TK, experts_TK)
    on_cpu, on_gpu = torch.zeros_like(expected), torch.zeros_like(expected)
    for own in (range(2), range(2, 5)):
        part = KINDS[kind](own)
        for name, parameter in part.named_parameters():
            parameter.data.copy_(dict(whole.named_parameters())[name][own.start : own.stop])
        part.requires_grad_(requires_grad=False)
        on_cpu += part(x_TD, weights_TK, experts_TK)
        part.to(DEVICE)
        on_gpu += part.run_grouped(x_TD.to(DEVICE), weights_TK.to(DEVICE), experts_TK.to(DEVICE)).cpu()  # type: ignore[operator]
    torch.testing.assert_close(on_cpu, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(on_gpu, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("num_assignments", "num_experts"), [(7, 3), (300, 63), (300, 64), (4500, 60)])
def test_assignments_of_other_ranks_come_last_and_have_no_tile(num_assignments: int, num_experts: int) -> None:
    torch.manual_seed(0)
    experts_S = torch.randint(-1, num_experts, (num_assignments,))
    order = sort_assignments(experts_S.to(DEVICE).unsqueeze(1), num_experts=num_experts, tile_tokens=16, partial=True)
    assert order.order_P is not None
    as_last = torch.where(experts_S < 0, num_experts, experts_S)
    assert torch.equal(order.order_P.cpu().long(), as_last.argsort(stable=True))
    tiles = {expert for expert in order.tiles_3L[0].tolist() if expert >= 0}
    assert tiles == set(experts_S[experts_S >= 0].tolist())
