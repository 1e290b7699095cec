"""Random adapters as PEFT saves them, and the checkpoint that results when one is merged into its base."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(
    base: Path, directory: Path, *, seed: int, rank: int = 4, targets: Sequence[str] = TARGETS, **fields: Any
) -> Path:
    """An adapter of the base's layers whose names end with one of the targets.

    Args:
        fields: of adapter_config.json.
    """
    directory.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets)} | fields
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(base / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if layer == name or not layer.endswith(tuple(targets)):
            continue
        own = rank_of(config, layer)
        outputs, inputs = weight.shape
        tensors[f"base_model.model.{layer}.lora_A.weight"] = torch.randn(own, inputs, generator=generator) * 0.2
        tensors[f"base_model.model.{layer}.lora_B.weight"] = torch.randn(outputs, own, generator=generator) * 0.2
    assert tensors, "no layer has such a name"
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def rank_of(config: dict[str, Any], layer: str) -> int:
    ranks: dict[str, int] = config.get("rank_pattern", {})
    return next((rank for key, rank in ranks.items() if layer.endswith(key)), int(config["r"]))


def merge(base: Path, adapter: Path, merged: Path) -> Path:
    """The base with W + B A * scale, in float32, in place of each W, as by PEFT's `merge_and_unload`."""
    merged.mkdir(parents=True)
    for file in base.iterdir():
        if file.is_file():
            (merged / file.name).write_bytes(file.read_bytes())
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights, matrices = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, a in matrices.items():
        if not name.endswith(".lora_A.weight"):
            continue
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        b, rank = matrices[name.replace("lora_A", "lora_B")], rank_of(config, layer)
        alphas = config.get("alpha_pattern", {})
        alpha = next((alphas[key] for key in alphas if layer.endswith(key)), config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        weight = weights[f"{layer}.weight"]
        weights[f"{layer}.weight"] = (weight.double() + b.double() @ a.double() * scale).float()
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    return merged
