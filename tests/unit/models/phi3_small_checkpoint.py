"""Phi-3-small's config.json, published and tiny, and a random checkpoint of it, which transformers cannot make."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

PUBLISHED: dict[str, Any] = {
    "architectures": ["Phi3SmallForCausalLM"],
    "attention_bias": False,
    "blocksparse_block_size": 64,
    "blocksparse_homo_head_pattern": False,
    "blocksparse_num_local_blocks": 16,
    "blocksparse_triton_kernel_block_size": 64,
    "blocksparse_vert_stride": 8,
    "dense_attention_every_n_layers": 2,
    "eos_token_id": 100257,
    "ff_dim_multiplier": None,
    "ff_intermediate_size": 14336,
    "gegelu_limit": 20.0,
    "hidden_act": "gegelu",
    "hidden_size": 4096,
    "layer_norm_epsilon": 1e-05,
    "max_position_embeddings": 8192,
    "mup_attn_multiplier": 1.0,
    "mup_embedding_multiplier": 10.0,
    "mup_use_scaling": True,
    "mup_width_multiplier": 8.0,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_embedding_base": 1000000,
    "rope_position_scale": 1.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 100352,
}
TINY: dict[str, Any] = PUBLISHED | {
    "blocksparse_block_size": 16,
    "blocksparse_num_local_blocks": 2,
    "blocksparse_vert_stride": 3,
    "dummy_token_indices": [3, 7],
    "ff_intermediate_size": 24,
    "gegelu_limit": 0.7,
    "hidden_size": 32,
    "max_position_embeddings": 256,
    "mup_attn_multiplier": 3.0,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rope_embedding_base": 1000,
    "rope_position_scale": 2.0,
    "torch_dtype": "float32",
    "vocab_size": 61,
}


def write_config(directory: Path, values: Mapping[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def save_phi3_small(directory: Path, values: Mapping[str, Any] = TINY) -> Path:
    """Named and shaped as published checkpoints are, drawn at random."""
    size, channels, vocab_size = values["hidden_size"], values["ff_intermediate_size"], values["vocab_size"]
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab_size, size)}
    for name in ("weight", "bias"):
        shapes[f"model.final_layernorm.{name}"] = (size,)
    for layer in range(values["num_hidden_layers"]):
        for module, rows, columns in (
            ("self_attn.query_key_value", (heads + 2 * kv_heads) * (size // heads), size),
            ("self_attn.dense", size, size),
            ("mlp.up_proj", 2 * channels, size),
            ("mlp.down_proj", size, channels),
        ):
            shapes[f"model.layers.{layer}.{module}.weight"] = (rows, columns)
            shapes[f"model.layers.{layer}.{module}.bias"] = (rows,)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{norm}.weight"] = shapes[f"model.layers.{layer}.{norm}.bias"] = (size,)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")
    return write_config(directory, values)
