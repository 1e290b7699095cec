"""The needs of a model: from an attention backend, and from the cache."""

from dataclasses import replace
from pathlib import Path

import pytest

from attention.backend import AttentionFeature, AttentionNeeds, MLADims
from baton.kvcache.spec import KVCacheSpec, KVKind
from baton.models.families.reader import read_config
from baton.models.loading.needs import attention_needs, kv_cache_spec, resolve_dtype
from tests.unit.models.paged import BLOCK_SIZE, cache_shape
from tests.unit.models.tiny import save_tiny


def needs_of(name: str, directory: Path, *, kv_dtype: str = "") -> AttentionNeeds:
    save_tiny(name, directory)
    config = read_config(directory)
    shape = cache_shape(config, num_blocks=16)
    return attention_needs(config, dtype="bfloat16", device="cuda:1", shape=shape, kv_dtype=kv_dtype, max_num_reqs=7)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", set()),
        ("mistral-full", set()),
        ("mistral-window", {AttentionFeature.SLIDING_WINDOW}),
        ("gemma2", {AttentionFeature.SLIDING_WINDOW, AttentionFeature.SOFT_CAP}),
        ("gemma2-untied-biases-no-caps", {AttentionFeature.SLIDING_WINDOW}),
        ("gemma3", {AttentionFeature.SLIDING_WINDOW}),
        ("llama4", {AttentionFeature.CHUNKED_LOCAL}),
        ("gpt-oss", {AttentionFeature.SLIDING_WINDOW, AttentionFeature.SINKS}),
        ("falcon-rw", {AttentionFeature.ALIBI}),
        ("falcon-new", set()),
        ("bloom", {AttentionFeature.ALIBI}),
        ("deepseek-v3", set()),
        ("deepseek-v32", {AttentionFeature.SPARSE}),
    ],
)
def test_needed_features_follow_from_the_config(name: str, expected: set[AttentionFeature], tmp_path: Path) -> None:
    assert needs_of(name, tmp_path).features == expected


def test_needed_sizes_and_bounds_follow_from_the_config(tmp_path: Path) -> None:
    needs = needs_of("gemma2", tmp_path)
    assert (needs.num_heads, needs.num_kv_heads, needs.head_size) == (4, 2, 12)
    assert (needs.device, needs.dtype, needs.cache_dtype) == ("cuda:1", "bfloat16", "bfloat16")
    assert (needs.block_size, needs.max_num_reqs, needs.max_model_len) == (BLOCK_SIZE, 7, 16 * BLOCK_SIZE)
    assert needs.mla is None


def test_the_parameters_of_each_layer_follow_from_the_config(tmp_path: Path) -> None:
    layers = needs_of("gemma2", tmp_path).layers
    assert list(layers) == [f"layers.{index}" for index in range(4)]
    assert [layer.sliding_window for layer in layers.values()] == [7, None, 7, None]
    assert {layer.logits_soft_cap for layer in layers.values()} == {2.0}
    assert {layer.scale for layer in layers.values()} == {20**-0.5}


def test_chunks_of_each_layer_follow_from_the_config(tmp_path: Path) -> None:
    layers = needs_of("llama4", tmp_path).layers
    assert [layer.attention_chunk_size for layer in layers.values()] == [6, 6, None, 6]


def test_dimensions_of_latent_attention_follow_from_the_config(tmp_path: Path) -> None:
    needs = needs_of("deepseek-v3-yarn", tmp_path)
    assert needs.kind is KVKind.MLA
    assert needs.mla == MLADims(qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, kv_lora_rank=24)
    assert (needs.num_heads, needs.num_kv_heads, needs.head_size) == (4, 1, 32)
    assert {layer.scale for layer in needs.layers.values()} != {20**-0.5}, "YaRN corrects the scale"


def test_an_8_bit_cache_has_a_dtype_of_its_own(tmp_path: Path) -> None:
    needs = needs_of("llama", tmp_path, kv_dtype="float8_e4m3fn")
    assert (needs.dtype, needs.cache_dtype) == ("bfloat16", "float8_e4m3fn")
    spec = kv_cache_spec(read_config(tmp_path), "bfloat16", "float8_e4m3fn")
    assert spec == KVCacheSpec(KVKind.GQA, 2, 2, 8, "float8_e4m3fn")


@pytest.mark.parametrize(
    ("stored", "runs_in"), [("float16", "bfloat16"), ("bfloat16", "bfloat16"), ("float32", "float32")]
)
def test_auto_takes_the_checkpoints_dtype_unless_the_family_overflows_in_it(
    stored: str, runs_in: str, tmp_path: Path
) -> None:
    save_tiny("gemma2", tmp_path)
    gemma = replace(read_config(tmp_path), dtype=stored)
    assert resolve_dtype(gemma, "auto", device_type="cuda") == runs_in
    assert resolve_dtype(gemma, "auto", device_type="cpu") == "float32"
