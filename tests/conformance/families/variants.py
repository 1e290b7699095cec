"""Other forms of a tiny checkpoint: weights in fp8 or int4, and with a LoRA adapter; each with its reference.

A quantized checkpoint's reference is transformers on what its numbers stand for. An adapter is made, saved and computed
by PEFT.
"""

import json
import math
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import peft
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GptOssForCausalLM
from transformers.pytorch_utils import Conv1D

from baton.models.checkpoint.names import LANGUAGE_MODEL, renamed
from baton.models.families.reader import read_config
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.linear import FusedLinear, Linear
from baton.models.layers.moe.experts import Experts
from baton.models.loading.expert_names import our_name
from baton.models.loading.loader import load_model
from tests.conformance.families.models import Case, Model, as_model, reload
from tests.unit.models.fp8_checkpoints import by_block, by_channel
from tests.unit.models.lora import merge, save_adapter
from tests.unit.models.packed_checkpoints import packed_config, packer, save_gpt_oss
from tests.unit.models.paged import backend_for

_FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_FP8_CHANNELS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["lm_head"],
}
# Parts of layers' names that PEFT takes for experts' in models that have experts.
_LIKE_EXPERTS = ("gate_proj", "up_proj", "down_proj")
# Layers that PEFT refuses by the type of model, as kernels read their weights without calling them.
_REFUSED_BY_PEFT = {"nemotron_h": (".out_proj",), "falcon_h1": (".out_proj",)}
_MOST_GROUP, _LEAST_GROUP = 32, 8


class Adapted(NamedTuple):
    """`adapter` is a directory as PEFT saves it."""

    model: Model
    adapter: Path


class Parts(NamedTuple):
    """Weights of a checkpoint's linear layers, whether experts are among them, and tensors that have all experts."""

    linear: list[str]
    has_experts: bool
    stacked_experts: tuple[str, ...]


def in_fp8(case: Case, directory: Path) -> Model:
    """By block where the model has experts, as such models are published, else by channel."""
    whole = case.make(directory / "whole", grown=True)
    parts = _parts_of(whole.directory)
    blocks = parts.has_experts
    config = _FP8_BLOCKS if blocks else _FP8_CHANNELS

    def quantize(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        stored, scales, meaning = by_block(weight) if blocks else by_channel(weight)
        return {"weight": stored, "weight_scale_inv" if blocks else "weight_scale": scales}, meaning

    return _quantized(case, whole, directory, parts, config, quantize)


def in_int4(case: Case, directory: Path) -> Model:
    """w4a16 in groups, as compressed-tensors packs them; mxfp4 of gpt-oss, as it is published."""
    if case.architecture == "GptOssForCausalLM":
        made = save_gpt_oss(directory)
        reference = GptOssForCausalLM.from_pretrained(made.plain, attn_implementation="eager", dtype=torch.float32)
        return as_model(made.quantized, reference.eval())
    whole = case.make(directory / "whole", grown=True)
    parts = _parts_of(whole.directory)
    tensors = load_file(whole.directory / "model.safetensors")
    inputs = {name: tensors[name].shape[1] for name in parts.linear}
    narrow = [name for name, size in inputs.items() if size % _LEAST_GROUP]
    parts = parts._replace(linear=[name for name in parts.linear if name not in narrow])
    group = math.gcd(_MOST_GROUP, *(inputs[name] for name in parts.linear))
    config = packed_config(group_size=group)
    config["ignore"] += [name.removesuffix(".weight") for name in narrow]
    return _quantized(case, whole, directory, parts, config, packer(config))


def with_adapter(case: Case, directory: Path) -> Adapted:
    """An adapter of all linear layers that the model's adapters can be of, but for routers."""
    whole = case.make(directory / "whole")
    parts = _parts_of(whole.directory)
    adaptable = {name.removesuffix(".weight") for name in parts.linear}
    adapter = directory / "adapter"
    if whole.reference is None:
        save_adapter(whole.directory, adapter, seed=0, targets=sorted(adaptable))
        merged = reload(whole, merge(whole.directory, adapter, directory / "merged"))
        return Adapted(replace(merged, directory=whole.directory), adapter)
    like_experts = _LIKE_EXPERTS if parts.has_experts else ()
    refused = _REFUSED_BY_PEFT.get(whole.reference.config.model_type, ())
    ours = {
        name: module
        for name, module in whole.reference.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and _ours(f"{name}.weight") in {_ours(f"{each}.weight") for each in adaptable}
        and not name.endswith((".kv_b_proj", "project_out", *like_experts, *refused))
    }
    transposed = any(isinstance(module, Conv1D) for module in ours.values())
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=list(ours), fan_in_fan_out=transposed)
    model = replace(whole, **adapted(whole, config, adapter))
    case.publish(whole.directory)
    if case.published and "language_model" in _first_name(whole.directory):
        _under_language_model(adapter)
    return Adapted(model, adapter)


def adapted(whole: Model, config: Any, adapter: Path, *, seed: int = 0) -> dict[str, Any]:
    """Saves an adapter with random numbers; returns the fields of a `Model` that has it."""
    made = peft.get_peft_model(whole.reference, config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    made.save_pretrained(adapter)
    return {"reference": made, "logits": partial(_adapted_logits, made)}


def _adapted_logits(made: Any, tokens: Any) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = made(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, -1]
        return logits


def _quantized(case: Case, whole: Model, directory: Path, parts: Parts, config: dict[str, Any], quantize: Any) -> Model:
    plain, quantized = directory / "plain", directory / "quantized"
    shutil.copytree(whole.directory, plain)
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, tensor in load_file(whole.directory / "model.safetensors").items():
        if name not in parts.linear:
            stored[name] = meant[name] = tensor
            continue
        own, meant[name] = quantize(tensor)
        stored |= {name.removesuffix("weight") + suffix: part.contiguous() for suffix, part in own.items()}
    save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(plain, quantized)
    save_file(stored, quantized / "model.safetensors", metadata={"format": "pt"})
    file = quantized / "config.json"
    if parts.stacked_experts:
        left_out = "ignore" if "ignore" in config else "modules_to_not_convert"
        config = {
            **config,
            left_out: [*config.get(left_out, ()), *(name.removesuffix(".weight") for name in parts.stacked_experts)],
        }
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    case.publish(quantized)
    return replace(reload(whole, plain), directory=quantized)


def _parts_of(directory: Path) -> Parts:
    config = read_config(directory)
    model = load_model(directory, config, backend=backend_for(config), dtype="float32", device="cpu")
    known = {_ours(name) for name in _linear_names(model)}
    linear, stacked = [], []
    for name, tensor in load_file(directory / "model.safetensors").items():
        ours = _ours(name)
        linear += [name] if ours in known and tensor.dim() == 2 else []
        stacked += [name] if tensor.dim() == 3 and ".experts." in ours else []
    return Parts(linear, any(".experts." in our_name(name) for name in linear), tuple(stacked))


def _ours(name: str) -> str:
    """One spelling of a tensor's name in files and in transformers' modules."""
    return our_name(renamed(name, {**LANGUAGE_MODEL, "backbone.": "model."}))


def _linear_names(model: CausalLM) -> list[str]:
    """Weights of linear layers and experts, without the head, in our names of a checkpoint."""
    names = []
    for path, module in model.named_modules():
        name = renamed(path, model.checkpoint_prefixes)
        if isinstance(module, FusedLinear):
            names += [f"{name.rpartition('.')[0]}.{part}.weight" for part, _ in module.parts]
        elif isinstance(module, Linear) and path != "lm_head":
            names.append(f"{name}.weight")
        elif isinstance(module, Experts):
            count = module.gate_up_proj.shape[0]
            kinds = ("gate_proj", "up_proj", "down_proj")
            names += [f"{name}.{expert}.{kind}.weight" for expert in range(count) for kind in kinds]
    return names


def _first_name(directory: Path) -> str:
    return str(next(iter(load_file(directory / "model.safetensors"))))


def _under_language_model(adapter: Path) -> None:
    """As PEFT names the layers of the whole multimodal model."""
    file = adapter / "adapter_model.safetensors"
    before, after = "base_model.model.model.", "base_model.model.model.language_model."
    tensors = {after + name.removeprefix(before): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file)
