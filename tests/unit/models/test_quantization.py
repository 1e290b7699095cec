"""quantization_config as publishers write it: supported settings, and errors that name all others."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ConfigError
from baton.models.config.quantization.config import Fp8Config, Granularity, Quantization
from baton.models.config.quantization.int8_config import Int8Config
from baton.models.config.quantization.packed_formats import AwqConfig, GptqConfig, PackQuantizedConfig
from baton.models.families.reader import read_config
from baton.models.loading.identity import config_digest
from tests.unit.models.packed_checkpoints import AWQ_CONFIG, gptq_config, int8_config, packed_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
}
DEEPSEEK = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
AUTO_FP8 = {"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"}
NUMBERS: dict[str, Any] = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": None,
    "num_bits": 8,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "tensor",
    "symmetric": True,
    "type": "float",
}
PER_TOKEN = NUMBERS | {"dynamic": True, "strategy": "token", "observer": None}


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None, **fields: Any) -> dict[str, Any]:
    group = {"input_activations": inputs, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "config_groups": {"group_0": group},
        "format": "float-quantized",
        "global_compression_ratio": 1.46,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "frozen",
        **fields,
    }


COMPRESSED = compressed(NUMBERS, NUMBERS)
COMPRESSED_DYNAMIC = compressed(
    NUMBERS | {"strategy": "channel"}, PER_TOKEN, quantization_status="compressed", sparsity_config={}, version="0.12.2"
)
COMPRESSED_BLOCKS = compressed(
    NUMBERS | {"strategy": "block", "block_structure": [128, 128]},
    PER_TOKEN | {"strategy": "group", "group_size": 128},
    transform_config={},
)


def read(directory: Path, quantization: dict[str, Any] | None) -> Quantization | None:
    (directory / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": quantization}))
    return read_config(directory).quantization


@pytest.mark.parametrize(
    ("published", "expected"),
    [
        (DEEPSEEK, Fp8Config(Granularity.BLOCK, False)),
        (DEEPSEEK | {"scale_fmt": "ue8m0"}, Fp8Config(Granularity.BLOCK, False, power_of_two_inputs=True)),
        (
            DEEPSEEK | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"], "dequantize": False},
            Fp8Config(Granularity.BLOCK, False, unquantized=("lm_head", "model.layers.0.mlp.gate")),
        ),
        (AUTO_FP8, Fp8Config(Granularity.TENSOR, True, unquantized=("lm_head",))),
        (
            AUTO_FP8 | {"activation_scheme": "dynamic", "kv_cache_scheme": "static"},
            Fp8Config(Granularity.TENSOR, False, unquantized=("lm_head",)),
        ),
        (COMPRESSED, Fp8Config(Granularity.TENSOR, True, unquantized=("lm_head",))),
        (COMPRESSED | {"kv_cache_scheme": NUMBERS}, Fp8Config(Granularity.TENSOR, True, unquantized=("lm_head",))),
        (COMPRESSED_DYNAMIC, Fp8Config(Granularity.CHANNEL, False, unquantized=("lm_head",))),
        (COMPRESSED_BLOCKS, Fp8Config(Granularity.BLOCK, False, unquantized=("lm_head",))),
        (gptq_config(damp_percent=0.1, meta={"quantizer": "gptq"}), GptqConfig("gptq", 4, 32, True)),
        (
            gptq_config(bits=8, group_size=-1, sym=False, desc_act=True, checkpoint_format="gptq_v2"),
            GptqConfig("gptq_v2", 8, None, False, reordered=True),
        ),
        (AWQ_CONFIG | {"version": "GEMM"}, AwqConfig("awq", 4, 32, False)),
        (packed_config(actorder="weight"), PackQuantizedConfig("pack-quantized", 4, 32, True, False, ("lm_head",))),
        (
            packed_config(num_bits=8, strategy="channel", group_size=None, actorder="group"),
            PackQuantizedConfig("pack-quantized", 8, None, True, True, ("lm_head",)),
        ),
        (int8_config(static=True), Int8Config("int8", True, True, ("lm_head",))),
        (int8_config(static=False), Int8Config("int8", True, False, ("lm_head",))),
        (None, None),
    ],
)
def test_published_settings_are_read(
    tmp_path: Path, published: dict[str, Any] | None, expected: Quantization | None
) -> None:
    assert read(tmp_path, published) == expected


@pytest.mark.parametrize(
    ("published", "field", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quantization_config", "quant_method gptq"),
        ({"quant_method": "mxfp4"}, "quantization_config", "bfloat16"),
        (gptq_config(bits=3), "bits", "4"),
        (gptq_config(group_size=0), "group_size", "-1"),
        (gptq_config(dynamic={"-:lm_head": {}}), "dynamic", "null"),
        (gptq_config(lm_head=True), "lm_head", "false"),
        (gptq_config(rotation="hadamard"), "rotation", "null"),
        (gptq_config(checkpoint_format="marlin"), "checkpoint_format", "gptq_v2"),
        (AWQ_CONFIG | {"version": "gemv"}, "version", "gemm"),
        (AWQ_CONFIG | {"zero_point": False}, "zero_point", "true"),
        (packed_config(num_bits=3), "num_bits", "4"),
        (packed_config(type="float"), "type", "int"),
        (packed_config(group_size=None), "group_size", "at least 1"),
        (packed_config() | {"format": "nvfp4-pack-quantized"}, "format", "pack-quantized"),
        (int8_config(static=True) | {"format": "naive-quantized"}, "format", "int-quantized"),
        ({}, "quantization_config", "quant_method fp8"),
        (DEEPSEEK | {"fmt": "e5m2"}, "fmt", "e4m3"),
        (DEEPSEEK | {"weight_block_size": [64, 128]}, "weight_block_size", "[128, 128]"),
        (DEEPSEEK | {"activation_scheme": "static"}, "activation_scheme", "dynamic"),
        (DEEPSEEK | {"activation_scheme": "none"}, "activation_scheme", "static"),
        (DEEPSEEK | {"scale_fmt": "e8m23"}, "scale_fmt", "ue8m0"),
        (DEEPSEEK | {"expert_dtype": "fp4"}, "expert_dtype", "fp8"),
        (DEEPSEEK | {"modules_to_convert": ["model.embed_tokens"]}, "modules_to_convert", "null"),
        (DEEPSEEK | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert", "list"),
        (COMPRESSED | {"format": "int-quantized"}, "type", "int"),
        (COMPRESSED | {"format": "pack-quantized"}, "input_activations", "null"),
        (COMPRESSED | {"quantization_status": "calibration"}, "quantization_status", "frozen"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "format", "dense"),
        (COMPRESSED | {"transform_config": {"r": 1}}, "transform_config", "null"),
        (COMPRESSED | {"config_groups": {}}, "config_groups", "one group"),
        (COMPRESSED | {"ignore": ["re:("]}, "ignore", "regular expression"),
        (COMPRESSED | {"ignore": ["re:(([a-z_.0-9])*)*X"]}, "ignore", "no repeated group"),
        (gptq_config(modules_to_not_convert=["re:.*.*.*.*.*.*.*X"]), "modules_to_not_convert", "list the modules"),
        (COMPRESSED | {"kv_cache_scheme": PER_TOKEN}, "kv_cache_scheme", "one scale per tensor"),
        (compressed(NUMBERS | {"num_bits": 4}, NUMBERS), "num_bits", "8"),
        (compressed(NUMBERS | {"type": "int"}, NUMBERS), "type", "float"),
        (compressed(NUMBERS | {"symmetric": False}, NUMBERS), "symmetric", "true"),
        (compressed(NUMBERS, None), "num_bits", "missing"),
        (compressed(NUMBERS | {"strategy": "channel"}, NUMBERS | {"strategy": "channel"}), "weights", "per token"),
        (
            compressed(NUMBERS | {"strategy": "block", "block_structure": [32, 32]}, PER_TOKEN),
            "block_structure",
            "[128, 128]",
        ),
    ],
)
def test_all_else_is_refused_by_name(tmp_path: Path, published: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, published)
    assert caught.value.field == field
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_family_that_we_cannot_quantize_is_refused(tmp_path: Path) -> None:
    config = LLAMA | {"architectures": ["BloomForCausalLM"], "quantization_config": DEEPSEEK}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"quantization_config is .*not supported"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "covered"),
    [
        ("model.layers.0.self_attn.q_proj", True),
        ("model.layers.1.self_attn.q_proj", False),
        ("model.layers.11.self_attn.q_proj", True),
        ("model.layers.3.mlp.gate_proj", True),
        ("model.layers.3.mlp.gate", False),
        ("model.layers.7.mlp.down_proj", False),
        ("model.layers.17.mlp.down_proj", True),
        ("lm_head", False),
    ],
)
def test_modules_are_left_out_by_name_by_end_and_by_pattern(name: str, covered: bool) -> None:
    left_out = ("model.layers.1", "mlp.gate", r"re:model\.layers\.7\..*down_proj$")
    assert Fp8Config(Granularity.BLOCK, False, unquantized=left_out).covers(name) is covered


def test_the_digest_differs_between_quantizations_and_not_between_spellings(tmp_path: Path) -> None:
    def digest(quantization: dict[str, Any] | None) -> str:
        read(tmp_path, quantization)
        return config_digest(read_config(tmp_path))

    digests = {digest(each) for each in (None, DEEPSEEK, AUTO_FP8, COMPRESSED_DYNAMIC)}
    assert len(digests) == 4
    assert digest(COMPRESSED) == digest(AUTO_FP8)
    swapped = [DEEPSEEK | {"modules_to_not_convert": names} for names in (["a", "b"], ["b", "a", "b"])]
    assert digest(swapped[0]) == digest(swapped[1])
