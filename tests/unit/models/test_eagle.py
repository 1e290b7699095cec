"""EAGLE-3 heads over the paged cache: their logits equal a plain reference, in pieces of any length; and which heads a
model refuses."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attention.backend import AttentionBackend
from baton.core.errors import ConfigError
from baton.kvcache.spec import KVKind
from baton.models.config.model_config import ModelConfig
from baton.models.families.dense.eagle_config import read_head
from baton.models.families.reader import read_config
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.parallel import TensorParallel
from baton.models.loading.draft_head import HeadShares, head_digest, load_head
from baton.models.loading.identity import config_digest
from baton.models.loading.loader import load_model, module_views
from baton.models.loading.local_config import local_config
from baton.models.loading.needs import kv_cache_spec
from bench.engine.run import CONFIGS
from tests.unit.models.paged import PagedDriver, backend_for
from tests.unit.models.test_equals_transformers import assert_equal, tokens_of
from tests.unit.models.tiny_eagle import DRAFTED, LAYERS, READS, save_with_head

TOKENS = 24
# Models, and what is special about their heads.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-own-embedding": ("llama-llama3-tied", {"own_embedding": True}),
    "llama-all-tokens": ("llama", {"drafted": 61}),
    "qwen3": ("qwen3", {}),
    "gpt-oss": ("gpt-oss", {}),
    "glm4-moe": ("glm4-moe", {}),
    "llama4": ("llama4", {}),
    "normed-residual": ("llama", {"config": {"norm_before_residual": True}}),
}


def loaded(
    directory: Path, config: ModelConfig, head: Path, *, parallel: TensorParallel | None = None, **given: Any
) -> tuple[CausalLM, AttentionBackend]:
    """The model with its head, and the backend of the model."""
    parallel = parallel or TensorParallel()
    local = local_config(config, parallel)
    assert local.eagle is not None
    backend = backend_for(local)
    arguments: dict[str, Any] = {"dtype": "float32", "device": "cpu", "parallel": parallel} | given
    model = load_model(directory, config, backend=backend, **arguments)
    load_head(head, model, config, backend=backend_for(local.eagle.layer), **arguments)
    return model, backend


class Pair:
    """A tiny model with its head twice: the reference and ours."""

    def __init__(self, kind: str, directory: Path) -> None:
        name, options = KINDS[kind]
        self.directory, self.head = directory, directory / "head"
        self.reference = save_with_head(name, directory, self.head, **options)
        plain = read_config(directory)
        self.config = plain.with_head(read_head(self.head, plain))
        self.model, self.backend = loaded(directory, self.config, self.head)

    def driver(self) -> PagedDriver:
        return PagedDriver(self.model, self.backend)

    def expected(self, tokens: list[int]) -> Tensor:
        """Logits of the head at all places but the last, whose next token is not known."""
        return self.reference.logits(self.reference.drafted(tokens[1:], self.reference.read(tokens[:-1])))


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=["llama", "llama-tied-own-embedding", "gpt-oss"])
def split(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param, tmp_path_factory.mktemp("split"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair("llama", tmp_path_factory.mktemp("llama"))


def assert_same(ours: Tensor, expected: Tensor) -> None:
    """Checks that logits are equal, and that the same tokens have none."""
    assert torch.equal(ours.isinf(), expected.isinf())
    assert_equal(ours.masked_fill(ours.isinf(), 0), expected.masked_fill(expected.isinf(), 0))


@pytest.mark.parametrize("piece", [TOKENS, 7, 1])
def test_logits_equal_the_reference_in_pieces_of_any_length(pair: Pair, piece: int) -> None:
    tokens = tokens_of(piece, TOKENS + 1)
    driver, drafted = pair.driver(), []
    for start in range(0, TOKENS, piece):
        stop = min(start + piece, TOKENS)
        driver.step({"r": tokens[start:stop]}, following={"r": tokens[stop]})
        drafted.append(driver.drafted["r"])
    assert_same(torch.cat(drafted), pair.expected(tokens))


def test_the_models_own_logits_stay_the_same(pair: Pair) -> None:
    plain = read_config(pair.directory)
    model = load_model(pair.directory, plain, backend=backend_for(plain), dtype="float32", device="cpu")
    tokens = tokens_of(4, TOKENS)
    alone = PagedDriver(model, backend_for(plain)).step({"r": tokens})["r"]
    assert torch.equal(pair.driver().step({"r": tokens}, following={"r": 1})["r"], alone)


def test_its_own_hidden_state_drafts_further_tokens(pair: Pair) -> None:
    """The second draft's place has the head's own hidden state of the place before, and the first draft."""
    tokens = tokens_of(3, TOKENS + 1)
    first, second = pair.reference.drafts(tokens, 2)
    driver = pair.driver()
    driver.step({"r": tokens[:-1]}, following={"r": tokens[-1]})
    assert int(driver.drafted["r"][-1].argmax()) == first
    driver.continue_drafts({"r": first})
    assert int(driver.drafted["r"][-1].argmax()) == second


def test_a_batch_of_decodes_and_prompts_equals_each_alone(pair: Pair) -> None:
    sequences = {name: tokens_of(seed, 9 + seed) for seed, name in enumerate("abc")}
    driver = pair.driver()
    driver.step({"a": sequences["a"][:-2]}, following={"a": sequences["a"][-2]})
    batch = {"a": sequences["a"][-2:-1], "b": sequences["b"][:-1], "c": sequences["c"][:-1]}
    driver.step(batch, following={name: tokens[-1] for name, tokens in sequences.items()})
    for name, tokens in sequences.items():
        assert_same(driver.drafted[name][-1:], pair.expected(tokens)[-1:])


def test_its_kv_is_a_part_of_the_cache_with_its_own_heads(llama: Pair) -> None:
    spec, plain = kv_cache_spec(llama.config, "float32"), read_config(llama.directory)
    assert spec.draft is not None
    assert (spec.draft.kind, spec.draft.num_layers) == (KVKind.GQA, 1)
    assert (spec.draft.num_kv_heads, spec.draft.head_dim) == (2, 8)
    assert replace(spec, draft=None) == kv_cache_spec(plain, "float32")
    assert config_digest(plain) == config_digest(llama.config), "KV of both kinds of nodes is of one model"


def test_the_names_and_the_config_of_speculators_are_another_spelling(llama: Pair, tmp_path: Path) -> None:
    fields = json.loads((llama.head / "config.json").read_text())
    layer = {name: fields[name] for name in fields if name not in ("architectures", "draft_vocab_size")}
    of_head = {"draft_vocab_size": DRAFTED, "eagle_aux_hidden_state_layer_ids": list(READS)}
    of_head |= {"target_hidden_size": fields["hidden_size"], "norm_before_residual": False}
    config = {"architectures": ["Eagle3Speculator"], "transformer_layer_config": layer, **of_head}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(llama.head / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    plain = read_config(llama.directory)
    assert read_head(tmp_path, plain) == llama.config.eagle
    model, backend = loaded(llama.directory, llama.config, tmp_path)
    driver, tokens = PagedDriver(model, backend), tokens_of(5, TOKENS)
    driver.step({"r": tokens[:-1]}, following={"r": tokens[-1]})
    assert_same(driver.drafted["r"], llama.expected(tokens))


def test_a_head_says_which_layers_it_reads_in_two_ways_or_reads_the_usual_ones(llama: Pair, tmp_path: Path) -> None:
    config = replace(read_config(llama.directory), num_layers=32)
    for fields, reads in (
        ({"eagle_aux_hidden_state_layer_ids": [3, 9, 20]}, (3, 9, 20)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}, (2, 16, 29)),
        ({}, (2, 16, 29)),
    ):
        whole = json.loads((llama.head / "config.json").read_text()) | {"eagle_aux_hidden_state_layer_ids": None}
        copied(llama.head, tmp_path, whole | fields)
        assert read_head(tmp_path, config).reads == reads


def test_a_head_in_the_form_of_llama_3_1_8b_s_is_read(tmp_path: Path) -> None:
    config = read_config(CONFIGS / "llama-3.1-8b")
    fields: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
        "draft_vocab_size": 32000,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    head = read_head(tmp_path, config, has_weights=False)
    assert (head.draft_vocab_size, head.reads, head.maps_tokens) == (32000, (2, 16, 29), True)
    assert not head.norm_before_residual
    assert (head.attention.num_heads, head.attention.num_kv_heads, head.attention.head_dim) == (32, 8, 128)
    assert head.layer.rope is not None
    assert (head.layer.rope.theta, head.layer.rope.scaling) == (10_000.0, None)
    assert head.layer.max_context_tokens == config.max_context_tokens


def copied(head: Path, directory: Path, config: dict[str, Any]) -> None:
    save_file(load_file(head / "model.safetensors"), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"hidden_size": 64}, "its hidden_size is 64, and the model has 32"),
        ({"vocab_size": 50}, "its vocab_size is 50, and the model has 61"),
        ({"architectures": ["LlamaForCausalLMEagle"]}, "allowed: LlamaForCausalLMEagle3, "),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "has one layer of Llama's form, whatever the model is"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; allowed: 1"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantiz"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 40]}, f"layers 1, 2, 40, and the model has {LAYERS}"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 1, 3]}, "layers 2, 1, 3, and"),
        ({"eagle_aux_hidden_state_layer_ids": None}, f"layers 2, 2, 1, and the model has {LAYERS}"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "last hidden state only"),
        ({"draft_vocab_size": 70}, "70 tokens of the model's 61"),
    ],
)
def test_a_head_of_another_model_is_refused(llama: Pair, tmp_path: Path, fields: dict[str, Any], problem: str) -> None:
    copied(llama.head, tmp_path, json.loads((llama.head / "config.json").read_text()) | fields)
    with pytest.raises(ConfigError) as refused:
        read_head(tmp_path, read_config(llama.directory))
    assert problem in str(refused.value)
    assert refused.value.field == "draft_head"
    assert refused.value.cure or refused.value.allowed


def _without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def _twice(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = torch.zeros(DRAFTED, dtype=torch.int64) - torch.arange(DRAFTED)


def _outside(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"][-1] = 61


def _other_dtype(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = tensors["d2t"].to(torch.float32)


def _other_form(tensors: dict[str, Tensor]) -> None:
    tensors["midlayer.self_attn.q_norm.weight"] = torch.ones(8)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_without("fc.weight"), r"1 missing: fc\.weight"),
        (_without("midlayer.hidden_norm.weight"), r"1 missing: midlayer\.hidden_norm\.weight"),
        (_without("d2t"), "40 tokens of the model's 61, and no tensor d2t"),
        (_twice, "d2t .* names a token twice"),
        (_outside, "d2t .* names token 100"),
        (_other_dtype, "d2t in model.safetensors is F32"),
        (_other_form, r"1 unexpected: midlayer\.self_attn\.q_norm\.weight"),
    ],
)
def test_a_damaged_head_is_refused(
    llama: Pair, tmp_path: Path, change: Callable[[dict[str, Tensor]], object], problem: str
) -> None:
    tensors = load_file(llama.head / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((llama.head / "config.json").read_text())
    plain = read_config(llama.directory)
    with pytest.raises(ConfigError, match=problem):
        loaded(llama.directory, plain.with_head(read_head(tmp_path, plain)), tmp_path)


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_hold_their_parts_of_the_head(split: Pair, load_format: str, size: int) -> None:
    def views(parallel: TensorParallel) -> dict[str, Tensor]:
        model, _ = loaded(split.directory, split.config, split.head, parallel=parallel, load_format=load_format)
        assert model.eagle is not None
        parts = (module_views(path, module) for path, module in model.eagle.named_modules())
        return {name: view for views in parts for name, view in views}

    assert split.config.eagle is not None
    if size == 4 and split.config.eagle.attention.num_heads % size:
        with pytest.raises(ConfigError, match="it has 6 query heads"):
            views(TensorParallel(0, size))
        return
    whole = views(TensorParallel())
    count = 0
    for rank in range(size):
        parallel = TensorParallel(rank, size)
        shares = HeadShares(split.config.eagle, parallel)
        for path, view in views(parallel).items():
            share = shares.of(path)
            parts = [whole[path]]
            if share is not None:
                parts = [whole[path].narrow(share.dim, part.start, len(part)) for part in share.ranges]
            own = torch.cat(parts, 0 if share is None else share.dim)
            assert torch.equal(view[: len(own)], own), path
            count += share is not None
    assert count >= size * 7, "attention and MLP are split"


def test_the_digest_is_that_of_the_tensors_and_of_the_fields_that_count(llama: Pair, tmp_path: Path) -> None:
    head = llama.config.eagle
    assert head is not None
    digest = head_digest(llama.head, head, load_format="safetensors")
    fields = json.loads((llama.head / "config.json").read_text())
    copied(llama.head, tmp_path, fields | {"torch_dtype": "float16", "use_cache": True})
    plain = read_config(llama.directory)
    assert head_digest(tmp_path, read_head(tmp_path, plain), load_format="safetensors") == digest
    copied(llama.head, tmp_path, fields | {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]})
    assert head_digest(tmp_path, read_head(tmp_path, plain), load_format="safetensors") != digest
    copied(llama.head, tmp_path, fields)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["fc.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    assert head_digest(tmp_path, read_head(tmp_path, plain), load_format="safetensors") != digest
