"""Adapters of routed experts: PEFT's of tensors with all experts, and those of each expert's layers, as older releases
of transformers have them; on one rank, on ranks with parts of every expert, and on ranks with whole experts."""

from functools import partial
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

from baton.core.errors import ConfigError
from baton.models.adapters.adapter import Adapter, has_experts, read_adapter
from baton.models.kernels import adapter_rows
from baton.models.kernels.moe.expert_weights import ExpertWeights
from baton.models.kernels.moe.grouped_gemm import multiply_by_expert
from baton.models.layers.parallel import TensorParallel
from tests.device import DEVICE
from tests.ranks import run_ranks
from tests.unit.engine.tiny import transformers_greedy
from tests.unit.models.lora import merge, save_adapter
from tests.unit.models.test_adapter_kernels import SHAPES, products, random_inputs, random_weights, slots_of
from tests.unit.models.test_adapters import PROMPTS, Adapted, layers_of, merged_logits, near
from tests.unit.models.test_adapters_of_peft import PROMPT, TOKENS, answer, build, save
from tests.unit.models.tiny import save_tiny

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft.*"),
    pytest.mark.filterwarnings("ignore:.*_pattern keys did not match:RuntimeWarning"),  # those of tensors do
]
BASES = ("mixtral", "qwen3-moe", "deepseek-v3")
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CONFIGS = {
    "experts": partial(LoraConfig, r=4, lora_alpha=12, target_modules=[], target_parameters=BOTH),
    "experts and attention": partial(
        LoraConfig,
        r=4,
        target_modules=["o_proj"],
        target_parameters=BOTH,
        rank_pattern={"experts.gate_up_proj": 2},
        alpha_pattern={"experts.down_proj": 20},
    ),
    "one of the tensors": partial(LoraConfig, r=3, target_modules=[], target_parameters=BOTH[:1]),
}
# As transformers names the layers of experts, or as publishers do.
TARGETS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "o_proj")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in BASES:
        save_tiny(name, root / name)
    return root


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("config", CONFIGS)
async def test_tokens_are_those_of_peft(config: str, base: str, bases: Path, tmp_path: Path) -> None:
    made = save(bases / base, CONFIGS[config](), tmp_path)
    expected = transformers_greedy(made, PROMPT, TOKENS)
    with made.disable_adapter():
        assert expected != transformers_greedy(made, PROMPT, TOKENS), "an adapter that changes nothing"
    assert await answer(build(bases / base, adapter_experts=True), tmp_path) == expected


@pytest.mark.parametrize("base", BASES)
def test_logits_with_each_expert_s_layers_equal_those_of_merged_weights(base: str, bases: Path, tmp_path: Path) -> None:
    adapter = save_adapter(bases / base, tmp_path / "adapter", seed=3, targets=TARGETS)
    expected = merged_logits(merge(bases / base, adapter, tmp_path / "merged"), PROMPTS["a"])
    plain = merged_logits(bases / base, PROMPTS["b"])
    adapted = Adapted(bases / base, experts=True)
    adapted.load(1, adapter)
    mixed = adapted.step({"a": PROMPTS["a"], "b": PROMPTS["b"]}, {"a": 1})
    assert near(mixed["a"], expected)
    assert near(mixed["b"], plain)


@pytest.mark.parametrize("base", BASES)
def test_without_an_adapter_a_batch_invariant_node_gives_the_same_bits_next_to_adapters_and_alone(
    base: str, bases: Path, tmp_path: Path
) -> None:
    """In bfloat16, in which the kernels of a step without adapters give others."""
    adapter = save_adapter(bases / base, tmp_path / "adapter", seed=3, targets=TARGETS)
    adapted = Adapted(bases / base, experts=True, batch_invariant=True, dtype="bfloat16")
    adapted.load(1, adapter)
    mixed = adapted.step({"a": PROMPTS["a"], "b": PROMPTS["b"]}, {"a": 1})
    assert torch.equal(adapted.driver.step({"b alone": PROMPTS["b"]})["b alone"], mixed["b"])
    assert torch.equal(adapted.step({"a alone": PROMPTS["a"]}, {"a alone": 1})["a alone"], mixed["a"])


@pytest.mark.parametrize("whole_experts", [False, True], ids=["parts of experts", "whole experts"])
def test_ranks_give_the_logits_of_one(whole_experts: bool, bases: Path, tmp_path: Path) -> None:
    adapters = {
        base: save_adapter(bases / base, tmp_path / base, seed=seed, targets=TARGETS)
        for seed, base in enumerate(("qwen3-moe", "deepseek-v3"))
    }
    (tmp_path / "ranks").mkdir()
    first, _ = run_ranks(_one_rank, 2, tmp_path / "ranks", bases, adapters, whole_experts)
    for base, adapter in adapters.items():
        adapted = Adapted(bases / base, experts=True)
        adapted.load(0, adapter)
        assert near(first[base], adapted.step({"a": PROMPTS["a"]}, {"a": 0})["a"])


def _one_rank(
    parallel: TensorParallel, bases: Path, adapters: dict[str, Path], whole_experts: bool
) -> dict[str, Tensor]:
    own = TensorParallel(parallel.rank, parallel.size, parallel.group, whole_experts=whole_experts)
    logits = {}
    for base, adapter in adapters.items():
        adapted = Adapted(bases / base, experts=True, parallel=own)
        read = read_adapter(adapter, adapted.bank.layers, max_rank=8)
        adapted.bank.load(0, Adapter.from_bytes(read.to_bytes()))
        logits[base] = adapted.step({"a": PROMPTS["a"]}, {"a": 0})["a"]
    return logits


@pytest.mark.parametrize("targets", [TARGETS, ()], ids=["each expert", "all in one"])
def test_without_room_for_experts_their_adapters_are_refused(
    targets: tuple[str, ...], bases: Path, tmp_path: Path
) -> None:
    if targets:
        save_adapter(bases / "qwen3-moe", tmp_path / "adapter", seed=1, targets=targets)
    else:
        save(bases / "qwen3-moe", CONFIGS["experts"](), tmp_path / "adapter")
    outside = {name: shape for name, shape in layers_of(bases / "qwen3-moe").items() if ".experts." not in name}
    with pytest.raises(ConfigError, match="routed experts") as refused:
        read_adapter(tmp_path / "adapter", outside, max_rank=8)
    assert refused.value.field == "adapter"
    assert "start the node with it" in (refused.value.cure or "")
    assert has_experts(tmp_path / "adapter")


def test_matrices_that_fit_no_tensor_of_the_experts_are_refused(bases: Path, tmp_path: Path) -> None:
    save(bases / "mixtral", CONFIGS["experts"](), tmp_path)
    layers = Adapted(bases / "qwen3-moe", experts=True).bank.layers
    with pytest.raises(ConfigError, match="no tensor there has these"):
        read_adapter(tmp_path, layers, max_rank=8)


@pytest.mark.parametrize("num_tokens", [1, 9])
@pytest.mark.parametrize("of", [None, 6], ids=["all held", "some held"])
def test_products_of_assignments_with_their_experts(num_tokens: int, of: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    weights_ENC = torch.randn(4, 40, 24, generator=generator)
    lowest = 0 if of is None else -1
    experts_TK = torch.stack([torch.randperm(4 - lowest, generator=generator)[:2] + lowest for _ in range(num_tokens)])
    x_SC = torch.randn(2 * num_tokens, 24, generator=generator)
    weights = ExpertWeights(weights_ENC.to(DEVICE))
    ours_SN = multiply_by_expert(x_SC.to(DEVICE), experts_TK.to(DEVICE), weights, of=of).cpu()
    for expert, x_C, ours_N in zip(experts_TK.flatten().tolist(), x_SC, ours_SN, strict=True):
        if expert >= 0:
            torch.testing.assert_close(ours_N, weights_ENC[expert] @ x_C, rtol=1e-4, atol=1e-4)


def test_more_pairs_than_the_kernel_counts_are_sorted_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, inputs, rank = SHAPES[0]
    weights, x_TK = random_weights(sizes, inputs, rank, torch.float32), random_inputs(40, inputs, torch.float32)
    out_TN = torch.zeros(40, sum(sizes))
    counted_TN = products(x_TK, out_TN, slots_of(40), weights)
    monkeypatch.setattr(adapter_rows, "_MOST_COUNTED_SLOTS", 2)
    assert products(x_TK, out_TN, slots_of(40), weights).equal(counted_TN)
