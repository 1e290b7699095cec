"""Pairs of tiny checkpoints: one in fp8, and one in float32 with the weights that the first one stands for.

Quantizes by loops over blocks, on purpose unlike the code under test.
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

BLOCK = 128
VOCAB_SIZE = 61
_SHARED = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 160,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
    "torch_dtype": "float32",
}
# Sizes of parts that are, and that are no, multiples of 128; columns in one whole block and a smaller one.
_LLAMA = _SHARED | {"intermediate_size": 272, "num_hidden_layers": 2, "num_key_value_heads": 2, "attention_bias": True}
_DEEPSEEK = _SHARED | {
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 144,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "moe_intermediate_size": 136,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
_STARCODER2 = _SHARED | {"intermediate_size": 272, "num_hidden_layers": 2, "num_key_value_heads": 2}
_EXPERTS = {"num_hidden_layers": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2}
_MIXTRAL = _SHARED | _EXPERTS | {"num_local_experts": 3, "intermediate_size": 272}
_QWEN2_MOE = (
    _SHARED
    | _EXPERTS
    | {"num_experts": 4, "intermediate_size": 256, "mlp_only_layers": [1]}
    | {"moe_intermediate_size": 136, "shared_expert_intermediate_size": 144}
)
# Checkpoints with several projections in one tensor, and thus with one scale for all of them, or with shared blocks.
_PHI3 = _LLAMA | {"attention_bias": False, "pad_token_id": 0}
FAMILIES = {
    "Llama": _LLAMA,
    "Phi3": _PHI3,
    "DeepseekV3": _DEEPSEEK,
    "DeepseekV32": _DEEPSEEK | {"index_topk": 5, "index_n_heads": 16, "index_head_dim": 24},
    "Mixtral": _MIXTRAL,
    "Qwen2Moe": _QWEN2_MOE,
    "Starcoder2": _STARCODER2,
}
LINEAR = (
    "_proj.weight",
    "_mqa.weight",
    ".c_fc.weight",
    "w1.weight",
    "w2.weight",
    "w3.weight",
    "shared_expert_gate.weight",
    ".wq_b.weight",
    ".wk.weight",
)
NEVER = (".weights_proj.weight",)


class Pair(NamedTuple):
    """`reference` is transformers' model with the dequantized weights; `plain` the directory that it was read from."""

    quantized: Path
    plain: Path
    reference: Any


def by_block(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(stored, its scales, what they stand for)."""
    scales = torch.empty(-(-weight.shape[0] // BLOCK), -(-weight.shape[1] // BLOCK))
    stored, meant = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    for row, column in torch.cartesian_prod(*map(torch.arange, scales.shape)).tolist():
        place = (slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK))
        stored[place], scales[row, column], meant[place] = by_tensor(weight[place])
    return stored, scales, meant


def by_tensor(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = weight.abs().max() / 448
    stored = (weight / scale).to(torch.float8_e4m3fn)
    return stored, scale, stored.float() * scale


def by_channel(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = [by_tensor(row) for row in weight]
    stored, scales = (torch.stack([row[index] for row in rows]) for index in range(2))
    scales = scales.bfloat16().unsqueeze(1)  # as published
    return stored, scales, stored.float() * scales.float()


Quantizer = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


def save_fp8(
    family: str,
    directory: Path,
    quantizer: Quantizer,
    quantization: dict[str, Any],
    *,
    scale_name: str,
    left_out: tuple[str, ...] = (),
    input_scale: float | None = None,
    fields: Mapping[str, Any] = MappingProxyType({}),
) -> Pair:
    """Both checkpoints, below `directory`; `fields` replace some of the family's config."""
    plain, quantized = directory / "plain", directory / "quantized"
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**FAMILIES[family], **fields})
    model_class = getattr(transformers, f"{family}ForCausalLM")
    model_class(config).save_pretrained(plain)
    tensors, rounded = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        tensors[name] = rounded[name] = tensor
        if name.endswith(LINEAR) and not name.endswith(NEVER) and not name.startswith(left_out or ("none",)):
            module = name.removesuffix(".weight")
            tensors[name], tensors[f"{module}.{scale_name}"], rounded[name] = quantizer(tensor)
            if input_scale is not None:
                tensors[f"{module}.input_scale"] = torch.tensor(input_scale)
    save_file(rounded, plain / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(plain, quantized)
    save_file(tensors, quantized / "model.safetensors")
    values = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(values | {"quantization_config": quantization}))
    reference = model_class.from_pretrained(plain, attn_implementation="eager", dtype=torch.float32).eval()
    return Pair(quantized, plain, reference)
