"""Gives layers the scales of an fp8 cache, and finds them under their names in published checkpoints.

Served models do not calculate scales from a batch: two nodes would disagree.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor, nn

from attention.layer import Attention
from attention.mla import MLAAttention
from baton.core.errors import ConfigError
from baton.kvcache.scales import KVScales
from baton.models.checkpoint.checkpoint import StoredTensor

# Spellings of llm-compressor, of vLLM's module names, and of ModelOpt.
_SPELLINGS = ("{layer}.{kind}_scale", "{layer}.attn.{kind}_scale", "{layer}.{kind}_proj.{kind}_scale")
_KINDS = ("q", "k", "v", "prob")
_SCALE = re.compile(r"\.([qkv]|prob)_scale$")


def add_scales(model: nn.Module) -> None:
    """Gives every attention layer that owns KV its own scales, which are 1 until they are filled. Other layers get the
    scales of the layer whose KV they read."""
    owners: dict[int, Attention] = {}
    for _, layer in _attention_layers(model):
        if isinstance(layer, Attention) and layer.shares_kv:
            layer.use_scales_of(owners[layer.kv_layer_index])
            continue
        layer.use_scales(KVScales())
        if isinstance(layer, Attention):
            owners[layer.layer_index] = layer


def scale_views(
    model: nn.Module, stored: Mapping[str, StoredTensor], checkpoint_name: Callable[[str], str]
) -> dict[str, Tensor]:
    """Returns the memory for each scale, by its name in the checkpoint. Layers without scales there are left out.

    A layer with a scale for its keys also needs one for its values, so both are named. Latents have only the keys'.

    Args:
        checkpoint_name: maps a module's path to its name in checkpoints.
    """
    views = {}
    for path, layer in _attention_layers(model):
        if layer.scales is None or (isinstance(layer, Attention) and layer.shares_kv):
            continue
        where = checkpoint_name(path.rpartition(".")[0])
        needed = ("k",) if isinstance(layer, MLAAttention) else ("k", "v")
        for spelling in _SPELLINGS:
            names = {kind: spelling.format(layer=where, kind=kind) for kind in _KINDS}
            if not any(name in stored for name in names.values()):
                continue
            for kind, name in names.items():
                if name in stored or kind in needed:
                    views[name] = _shaped_as(stored.get(name), getattr(layer.scales, f"{kind}_scale"))
            break
    return views


def without_scales(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the tensors without scales, for a model whose cache stores KV as computed."""
    return {name: tensor for name, tensor in stored.items() if not _SCALE.search(name)}


def kv_scales(model: nn.Module) -> tuple[float, ...]:
    """Returns the scales of a model's fp8 cache, layer by layer: of keys and values, or of latents. Empty for other
    caches. The host waits for the device. A layer that drafts tokens is left out, because its KV is never converted."""
    by_layer: dict[int, tuple[float, ...]] = {}
    for path, layer in _attention_layers(model):
        if layer.scales is None or path.startswith(("mtp.", "eagle.")):
            continue
        _, k_scale, v_scale = layer.scales.tensors
        if isinstance(layer, MLAAttention):
            by_layer[layer.layer_index] = (k_scale.item(),)
        elif not layer.shares_kv:
            by_layer[layer.kv_layer_index] = (k_scale.item(), v_scale.item())
    return tuple(scale for index in sorted(by_layer) for scale in by_layer[index])


def refuse_scales_of_another_format(views: Mapping[str, Tensor], kv_dtype: str) -> None:
    """Raises ConfigError for a checkpoint's scales in a cache in e5m2: all publishers make them for e4m3."""
    if views and kv_dtype == "float8_e5m2":
        raise ConfigError(
            f"kv_cache_dtype is fp8_e5m2, and the checkpoint has scales of KV in e4m3, such as {next(iter(views))}",
            field="kv_cache_dtype",
            value="fp8_e5m2",
            allowed=("auto", "fp8_e4m3"),
        )


def check_scales(views: Mapping[str, Tensor]) -> None:
    """Raises ConfigError for a scale that is not a finite number above 0."""
    for name, view in views.items():
        value = view.item()
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(
                f"{name} is {value}",
                field="kv_cache_dtype",
                value=value,
                allowed=("a finite number above 0",),
                cure="take --kv-cache-dtype auto, or a checkpoint whose scales are right",
            )


def _attention_layers(model: nn.Module) -> Iterator[tuple[str, Attention | MLAAttention]]:
    for path, module in model.named_modules():
        if isinstance(module, (Attention, MLAAttention)):
            yield path, module


def _shaped_as(tensor: StoredTensor | None, scale: Tensor) -> Tensor:
    """Returns a view of `scale` in the tensor's shape, because checkpoints store one number as [] or as [1]."""
    return scale.view(1) if tensor is not None and tensor.shape == (1,) else scale
