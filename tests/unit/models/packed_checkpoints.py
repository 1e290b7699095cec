"""Pairs of tiny checkpoints: one with packed, int8 or mxfp4 weights, and one in float32 with what the first one means.

Packs by the loops of AutoGPTQ, AutoAWQ and compressed-tensors, word by word, on purpose unlike the code under test.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.unit.models.fp8_checkpoints import FAMILIES, LINEAR, VOCAB_SIZE, Pair

GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_LLAMA = FAMILIES["Llama"] | {"hidden_size": 64, "intermediate_size": 128}
_DEEPSEEK = FAMILIES["DeepseekV3"] | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "v_head_dim": 32,
}
_MIXTRAL = FAMILIES["Mixtral"] | {"hidden_size": 64, "intermediate_size": 128}
_GPT_OSS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 7,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
SIZES = {"Llama": _LLAMA, "DeepseekV3": _DEEPSEEK, "Mixtral": _MIXTRAL}


class Numbers(NamedTuple):
    """A weight [N, K]: (number - zero) * scale of its column's group. Scales and zeros are [N, G]."""

    numbers: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor
    meaning: Tensor


def quantized(weight: Tensor, *, bits: int, group: int, symmetric: bool, reordered: bool) -> Numbers:
    columns = weight.shape[1]
    group = columns if group == -1 else group
    groups = torch.arange(columns) // group
    if reordered:
        groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
    numbers, meaning = torch.empty(weight.shape, dtype=torch.int32), torch.empty(weight.shape)
    scales, zeros = [], []
    for index in range(int(groups.max()) + 1):
        part = weight[:, groups == index]
        low, high = part.amin(1, keepdim=True), part.amax(1, keepdim=True)
        if symmetric:
            scale = (2 * torch.maximum(-low, high) / (2**bits - 1)).half()
            zero = torch.full_like(scale, 2 ** (bits - 1)).int()
        else:
            scale = ((high - low) / (2**bits - 1)).half()
            zero = (-low / scale).round().int().clamp(0, 2**bits - 1)
        number = ((part / scale).round().int() + zero).clamp(0, 2**bits - 1)
        numbers[:, groups == index] = number
        meaning[:, groups == index] = (number - zero).float() * scale.float()
        scales.append(scale)
        zeros.append(zero)
    return Numbers(numbers, torch.cat(scales, 1), torch.cat(zeros, 1), groups.int(), meaning)


def words_along_rows(numbers: Tensor, bits: int) -> Tensor:
    """AutoGPTQ's loop over rows."""
    per_word = 32 // bits
    words = torch.zeros(-(-numbers.shape[0] // per_word), numbers.shape[1], dtype=torch.int64)
    for row in range(numbers.shape[0]):
        words[row // per_word] |= numbers[row].long() << (row % per_word * bits)
    return words.to(torch.uint32).view(torch.int32)


def awq_words(numbers: Tensor) -> Tensor:
    """AutoAWQ's loop over columns."""
    words = torch.zeros(numbers.shape[0], numbers.shape[1] // 8, dtype=torch.int64)
    for column in range(words.shape[1]):
        for place, output in enumerate(AWQ_ORDER):
            words[:, column] |= numbers[:, column * 8 + output].long() << (4 * place)
    return words.to(torch.uint32).view(torch.int32)


def gptq(each: Numbers, bits: int, *, v2: bool = False) -> dict[str, Tensor]:
    zeros = each.zeros if v2 else (each.zeros - 1) & (2**bits - 1)
    return {
        "qweight": words_along_rows(each.numbers.T, bits),
        "qzeros": words_along_rows(zeros, bits).T.contiguous(),
        "scales": each.scales.T.contiguous(),
        "g_idx": each.groups,
    }


def awq(each: Numbers, bits: int) -> dict[str, Tensor]:
    assert bits == 4
    return {
        "qweight": awq_words(each.numbers.T),
        "qzeros": awq_words(each.zeros.T),
        "scales": each.scales.T.contiguous(),
    }


def pack_quantized(each: Numbers, bits: int, *, symmetric: bool, reordered: bool) -> dict[str, Tensor]:
    tensors = {
        "weight_packed": words_along_rows(each.numbers.T, bits).T.contiguous(),
        "weight_scale": each.scales,
        "weight_shape": torch.tensor(each.numbers.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words_along_rows(each.zeros, bits)
    if reordered:
        tensors["weight_g_idx"] = each.groups
    return tensors


# From a weight to (the tensors that a checkpoint has in its place, what they mean).
Packer = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]


def gptq_config(**fields: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, **fields}


AWQ_CONFIG = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": GROUP,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": None,
}


def packed_config(**weights: Any) -> dict[str, Any]:
    numbers = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP, **weights}
    return _compressed("pack-quantized", numbers, None)


def int8_config(*, static: bool) -> dict[str, Any]:
    numbers = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
    inputs = numbers | ({"strategy": "tensor"} if static else {"strategy": "token", "dynamic": True})
    return _compressed("int-quantized", numbers | {"strategy": "channel"}, inputs)


def _compressed(kind: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"weights": weights, "input_activations": inputs, "output_activations": None, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def packer(config: Mapping[str, Any]) -> Packer:
    """Of the scheme that a checkpoint's `quantization_config` names."""
    method = config["quant_method"]
    if method == "compressed-tensors":
        weights = config["config_groups"]["group_0"]["weights"]
        if config["format"] == "int-quantized":
            return _int8(static=not config["config_groups"]["group_0"]["input_activations"]["dynamic"])
        bits, symmetric, reordered = weights["num_bits"], weights["symmetric"], weights.get("actorder") == "group"
        group = -1 if weights["strategy"] == "channel" else weights["group_size"]
    else:
        bits, group, reordered = config["bits"], config["group_size"], config.get("desc_act", False)
        symmetric = config.get("sym", False)

    def pack(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        each = quantized(weight, bits=bits, group=group, symmetric=symmetric, reordered=reordered)
        if method == "gptq":
            return gptq(each, bits, v2=config.get("checkpoint_format") == "gptq_v2"), each.meaning
        if method == "awq":
            return awq(each, bits), each.meaning
        return pack_quantized(each, bits, symmetric=symmetric, reordered=reordered), each.meaning

    return pack


def _int8(*, static: bool) -> Packer:
    def pack(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
        stored = (weight / scale).round().clamp(-128, 127).to(torch.int8)
        tensors = {"weight": stored, "weight_scale": scale}
        if static:
            tensors["input_scale"] = torch.tensor([0.02])
        return tensors, stored.float() * scale.float()

    return pack


def save_packed(
    family: str,
    directory: Path,
    quantization: dict[str, Any],
    *,
    left_out: tuple[str, ...] = ("none",),
    fields: Mapping[str, Any] = MappingProxyType({}),
) -> Pair:
    """Both checkpoints, below `directory`; `fields` replace some of the family's config."""
    pack = packer(quantization)
    plain = directory / "plain"
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES[family], **fields})
    model_class = getattr(transformers, f"{family}ForCausalLM")
    model_class(config).save_pretrained(plain)
    tensors: dict[str, Tensor] = {}
    rounded: dict[str, Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if name.endswith(LINEAR) and not name.startswith(left_out):
            layer = name.removesuffix("weight")
            parts, rounded[name] = pack(tensor)
            tensors |= {layer + suffix: part for suffix, part in parts.items()}
        else:
            tensors[name] = rounded[name] = tensor
    save_file(rounded, plain / "model.safetensors", metadata={"format": "pt"})
    return Pair(_copy_with(plain, directory / "quantized", tensors, quantization), plain, None)


def _copy_with(plain: Path, target: Path, tensors: dict[str, Tensor], quantization: dict[str, Any]) -> Path:
    shutil.copytree(plain, target)
    save_file(tensors, target / "model.safetensors")
    values = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(values | {"quantization_config": quantization}))
    return target


def save_gpt_oss(
    directory: Path,
    *,
    fields: Mapping[str, Any] = MappingProxyType({}),
    scales: tuple[int, int] = (121, 124),
) -> Pair:
    """gpt-oss with random blocks and scales; transformers' own conversion makes the plain one.

    Args:
        fields: replace some of the config.
        scales: the least and the largest stored scale, a power of two plus 127.
    """
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    plain = directory / "plain"
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**{**_GPT_OSS, **fields})
    transformers.GptOssForCausalLM(config).save_pretrained(plain)
    tensors, rounded = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        tensors[name] = rounded[name] = tensor
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = tensor.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            stored = torch.randint(scales[0], scales[1] + 1, (experts, outputs, inputs // 32), dtype=torch.uint8)
            del tensors[name]
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": stored}
            rounded[name] = convert_moe_packed_tensors(blocks, stored, dtype=torch.float32).contiguous()
        elif name.endswith(("proj_bias", "sinks")):
            tensors[name] = rounded[name] = torch.randn(tensor.shape) * 0.1
    save_file(rounded, plain / "model.safetensors", metadata={"format": "pt"})
    names = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": names}
    return Pair(_copy_with(plain, directory / "quantized", tensors, quantization), plain, None)
