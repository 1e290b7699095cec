"""A model with an adapter equals, in transformers, the base with the adapter's product merged into its weights; each
request of a mixed batch equals itself alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.core.errors import ConfigError
from baton.models.adapters.adapter import Adapter, LayerShape, read_adapter
from baton.models.adapters.bank import AdapterBank
from baton.models.families.reader import read_config
from baton.models.layers.parallel import SINGLE, TensorParallel
from baton.models.loading.loader import load_model
from baton.models.loading.local_config import local_config
from tests.ranks import run_ranks
from tests.unit.models.lora import TARGETS, merge, save_adapter
from tests.unit.models.paged import PagedDriver, backend_for
from tests.unit.models.tiny import save_tiny

LLAMA, DEEPSEEK = "llama-linear-biases-wide-heads", "deepseek-v3"
FALCON, GPT_OSS = "falcon-new", "gpt-oss"
MLA_TARGETS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "mlp.gate_proj", "shared_experts.up_proj")
BY_LAYER: dict[str, Any] = {
    "rank_pattern": {"layers.0.self_attn.q_proj": 2, "down_proj": 6},
    "alpha_pattern": {"o_proj": 3, "layers.1.mlp.gate_proj": 20},
}
PROMPTS = {"a": [3, 14, 15, 9, 26], "b": [5, 35, 8], "c": [3, 14, 15, 9], "d": [1]}


class Adapted:
    """A model with its bank, and a cache."""

    def __init__(
        self,
        directory: Path,
        *,
        experts: bool = False,
        parallel: TensorParallel = SINGLE,
        batch_invariant: bool = False,
        dtype: str = "float32",
    ) -> None:
        config = read_config(directory)
        backend = backend_for(local_config(config, parallel), dtype)
        self.model = load_model(
            directory,
            config,
            backend=backend,
            dtype=dtype,
            device="cpu",
            parallel=parallel,
            batch_invariant=batch_invariant,
        )
        self.bank = AdapterBank(
            self.model,
            config,
            count=3,
            rank=8,
            experts=experts,
            parallel=parallel,
            batch_invariant=batch_invariant,
        )
        self.driver = PagedDriver(self.model, backend, dtype)

    def load(self, slot: int, directory: Path) -> Adapter:
        adapter = read_adapter(directory, self.bank.layers, max_rank=8)
        self.bank.load(slot, adapter)
        return adapter

    def step(self, batch: dict[str, list[int]], slots: dict[str, int]) -> dict[str, Tensor]:
        rows = [slots.get(name, -1) for name, tokens in batch.items() for _ in tokens]
        return self.driver.step(batch, torch.tensor(rows, dtype=torch.int32))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bases, and adapters of the llama."""
    root = tmp_path_factory.mktemp("models")
    for name in (LLAMA, DEEPSEEK, FALCON, GPT_OSS):
        save_tiny(name, root / name)
    save_adapter(root / LLAMA, root / "one", seed=1, **BY_LAYER)
    save_adapter(root / LLAMA, root / "two", seed=2, rank=8, targets=("q_proj", "down_proj"), use_rslora=True)
    return root


def merged_logits(directory: Path, tokens: list[int]) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def near(ours: Tensor, expected: Tensor) -> bool:
    return bool((ours - expected).abs().max() < 2e-5 * max(1.0, float(expected.abs().max())))


@pytest.mark.parametrize(
    ("base", "fields"),
    [
        (LLAMA, BY_LAYER),
        (LLAMA, {"use_rslora": True, "r": 8, "rank": 8}),
        (LLAMA, {"targets": ("v_proj", "up_proj")}),
        (DEEPSEEK, {"targets": MLA_TARGETS}),
        (FALCON, {"targets": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")}),
        (GPT_OSS, {"targets": TARGETS[:4]}),
    ],
    ids=["patterns", "rslora", "parts of fused layers", "latent attention and experts", "fused in the file", "gpt-oss"],
)
def test_logits_equal_those_of_merged_weights(
    checkpoints: Path, tmp_path: Path, base: str, fields: dict[str, Any]
) -> None:
    adapter = save_adapter(checkpoints / base, tmp_path / "adapter", seed=7, **fields)
    adapted = Adapted(checkpoints / base)
    adapted.load(1, adapter)
    prompt = PROMPTS["a"]
    ours = adapted.step({"a": prompt}, {"a": 1})["a"]
    expected = merged_logits(merge(checkpoints / base, adapter, tmp_path / "merged"), prompt)
    assert near(ours, expected)
    assert not near(merged_logits(checkpoints / base, prompt), expected), "the adapter changes nothing"


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_requests_of_a_mixed_batch_equal_themselves_alone(checkpoints: Path, batch_invariant: bool) -> None:
    slots = {"a": 0, "b": 2, "c": -1, "d": 0}
    mixed, base = (Adapted(checkpoints / LLAMA, batch_invariant=batch_invariant) for _ in range(2))
    for slot, name in ((0, "one"), (2, "two")):
        mixed.load(slot, checkpoints / name)
    together = mixed.step(PROMPTS, slots)
    for name, tokens in PROMPTS.items():
        alone = mixed.step({f"{name} alone": tokens}, {f"{name} alone": slots[name]})[f"{name} alone"]
        assert near(together[name], alone)
        assert not batch_invariant or torch.equal(together[name], alone)
    without = base.step(PROMPTS, {})
    assert torch.equal(together["c"], without["c"]), "a request without an adapter changes with its neighbours'"
    assert not near(together["a"], without["a"])
    assert not near(together["a"][:4], without["c"])


def test_a_slot_that_is_filled_again_has_nothing_of_its_last_adapter(checkpoints: Path) -> None:
    adapted, fresh = Adapted(checkpoints / LLAMA), Adapted(checkpoints / LLAMA)
    first = adapted.load(0, checkpoints / "one")
    second = adapted.load(0, checkpoints / "two")
    fresh.load(0, checkpoints / "two")
    assert first.revision != second.revision
    ours, expected = (each.step({"a": PROMPTS["a"]}, {"a": 0})["a"] for each in (adapted, fresh))
    assert torch.equal(ours, expected)


def test_ranks_add_their_shares(checkpoints: Path, tmp_path: Path) -> None:
    adapters = {LLAMA: checkpoints / "one"}
    adapters[DEEPSEEK] = save_adapter(checkpoints / DEEPSEEK, tmp_path / "d", seed=7, targets=MLA_TARGETS)
    adapters[FALCON] = save_adapter(
        checkpoints / FALCON, tmp_path / "f", seed=8, targets=("query_key_value", "dense", "dense_4h_to_h")
    )
    (tmp_path / "ranks").mkdir()
    first, _ = run_ranks(_one_rank, 2, tmp_path / "ranks", checkpoints, adapters)
    for base, adapter in adapters.items():
        adapted = Adapted(checkpoints / base)
        adapted.load(0, adapter)
        assert near(first[base], adapted.step({"a": PROMPTS["a"]}, {"a": 0})["a"])


def _one_rank(parallel: TensorParallel, checkpoints: Path, adapters: dict[str, Path]) -> dict[str, Tensor]:
    logits = {}
    for base, adapter in adapters.items():
        adapted = Adapted(checkpoints / base, parallel=parallel)
        read = read_adapter(adapter, adapted.bank.layers, max_rank=8)
        adapted.bank.load(0, Adapter.from_bytes(read.to_bytes()))
        logits[base] = adapted.step({"a": PROMPTS["a"]}, {"a": 0})["a"]
    return logits


def layers_of(base: Path) -> dict[str, LayerShape]:
    weights = load_file(base / "model.safetensors")
    return {
        name.removesuffix(".weight"): LayerShape(weight.shape[1], weight.shape[0])
        for name, weight in weights.items()
        if name.endswith("_proj.weight")
    }


def test_the_revision_follows_numbers_and_scales_only(checkpoints: Path, tmp_path: Path) -> None:
    base = checkpoints / LLAMA
    layers = layers_of(base)

    def revision(name: str, **fields: Any) -> str:
        return read_adapter(save_adapter(base, tmp_path / name, **fields), layers, max_rank=8).revision

    first = revision("x", seed=1)
    assert first == revision("y", seed=1, lora_dropout=0.1, base_model_name_or_path="elsewhere")
    assert len({first, revision("z", seed=2), revision("v", seed=1, lora_alpha=5)}) == 3


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "lora_only"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"peft_type": "LOHA"}, "peft_type"),
        ({"a_feature_of_tomorrow": True}, "a_feature_of_tomorrow"),
        ({"lora_alpha": "16"}, "lora_alpha"),
        ({"lora_alpha": 10**400}, "lora_alpha"),
        ({"lora_alpha": 1e39}, "lora_alpha"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern"),
        ({"rank_pattern": {"(([a-z_.0-9])*)*X": 4}}, "rank_pattern"),
        ({"alpha_pattern": {".*.*.*.*X": 4}}, "alpha_pattern"),
        ({"alpha_pattern": {"(|)(|)(|)(|)X": 4}}, "alpha_pattern"),
        ({"rank": 9}, "max_adapter_rank"),
        ({"rank_pattern": {r"layers\.0.*q_proj": 5}}, "adapter"),
        ({"targets": ("lm_head",)}, "adapter"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    checkpoints: Path, tmp_path: Path, fields: dict[str, Any], field: str
) -> None:
    adapter = save_adapter(checkpoints / LLAMA, tmp_path / "adapter", seed=1, **fields)
    with pytest.raises(ConfigError) as caught:
        read_adapter(adapter, layers_of(checkpoints / LLAMA), max_rank=8)
    assert caught.value.field == field
    assert caught.value.cure


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("model.layers.0.mlp.shared_expert.up_proj", "model.layers.0.mlp.shared_experts.up_proj"),
        ("model.language_model.layers.0.mlp.shared_mlp.up_proj", "model.layers.0.mlp.shared_experts.up_proj"),
        ("model.layers.0.mixer.up_proj", "backbone.layers.0.mixer.up_proj"),
        ("backbone.layers.0.mixer.up_proj", "backbone.layers.0.mixer.up_proj"),
    ],
)
def test_other_names_of_a_layer_are_understood(name: str, own: str, tmp_path: Path) -> None:
    """Those of publishers and of transformers; `alpha_pattern` goes by them, too."""
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 1, "alpha_pattern": {name.partition("layers.0.")[2]: 6}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    sides = {"A": torch.ones(2, 3), "B": torch.ones(4, 2)}
    save_file(
        {f"base_model.model.{name}.lora_{side}.weight": each for side, each in sides.items()},
        tmp_path / "adapter_model.safetensors",
    )
    assert read_adapter(tmp_path, {own: LayerShape(3, 4)}, max_rank=2).layers[own].scale == 3


def test_damaged_adapters_are_refused(checkpoints: Path, tmp_path: Path) -> None:
    layers = layers_of(checkpoints / LLAMA)
    adapter = save_adapter(checkpoints / LLAMA, tmp_path / "adapter", seed=1)
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "lora_B" in name)
    save_file({key: each for key, each in tensors.items() if key != name}, file)
    with pytest.raises(ConfigError, match="only one of the two matrices"):
        read_adapter(adapter, layers, max_rank=8)
    save_file(tensors | {"base_model.model.model.embed_tokens.lora_embedding_A": tensors[name].clone()}, file)
    with pytest.raises(ConfigError, match="lora_embedding_A"):
        read_adapter(adapter, layers, max_rank=8)
    save_file(tensors | {name.removeprefix("base_model.model."): tensors[name].clone()}, file)
    with pytest.raises(ConfigError, match="twice, with and without"):
        read_adapter(adapter, layers, max_rank=8)
    save_file(tensors | {name: tensors[name].fill_(float("nan"))}, file)
    with pytest.raises(ConfigError, match=r"NaN or inf in .*lora_B"):
        read_adapter(adapter, layers, max_rank=8)
    file.unlink()
    with pytest.raises(ConfigError, match="has no adapter_model"):
        read_adapter(adapter, layers, max_rank=8)
    (adapter / "adapter_config.json").write_text(json.dumps([]))
    with pytest.raises(ConfigError, match="not a JSON object"):
        read_adapter(adapter, layers, max_rank=8)
