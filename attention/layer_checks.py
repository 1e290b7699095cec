"""Checks an attention layer's parameters, its backend and its memory. A failed check raises."""

import torch
from torch import Tensor

from attention.backend import AttentionFeature, BackendCapabilities
from attention.parameters import AttentionParameters, AttentionType, PerLayerParameters, per_layer_parameters
from baton.core.errors import ConfigError, InternalError
from baton.kvcache.spec import KVKind


def asked_features(parameters: AttentionParameters) -> frozenset[AttentionFeature]:
    """Returns the features that a backend must declare for a layer."""
    windowed, causal = parameters.sliding_window is not None, parameters.attn_type is AttentionType.DECODER
    asked = {
        AttentionFeature.SLIDING_WINDOW: windowed and causal,
        AttentionFeature.ENCODER_WINDOW: windowed and not causal,
        AttentionFeature.CHUNKED_LOCAL: parameters.attention_chunk_size is not None,
        AttentionFeature.SOFT_CAP: parameters.logits_soft_cap is not None,
        AttentionFeature.ALIBI: parameters.alibi_slopes_H is not None,
        AttentionFeature.SINKS: parameters.sinks_H is not None,
        AttentionFeature.BLOCK_SPARSE: parameters.blocksparse is not None,
        AttentionFeature.ENCODER: not causal,
    }
    return frozenset(feature for feature, is_asked in asked.items() if is_asked)


def check_parameters(parameters: AttentionParameters, *, num_heads: int, num_kv_heads: int) -> None:
    """Raises ConfigError for parameters that no backend could support."""
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
        raise refused("num_kv_heads", num_kv_heads, f"a divisor of num_heads ({num_heads})")
    for name in ("sliding_window", "attention_chunk_size"):
        size = getattr(parameters, name)
        if size is not None and size < 1:
            raise refused(name, size, "an integer of at least 1", "none")
    cap = parameters.logits_soft_cap
    if cap is not None and cap <= 0:
        raise refused("logits_soft_cap", cap, "a number above 0", "none")
    for name, tensor in (("alibi_slopes", parameters.alibi_slopes_H), ("sinks", parameters.sinks_H)):
        if tensor is not None and tensor.shape != (num_heads,):
            raise refused(name, tuple(tensor.shape), f"one number for each of the {num_heads} query heads")
    pattern = parameters.blocksparse
    if pattern is not None and (pattern.num_heads, pattern.num_kv_heads) != (num_heads, num_kv_heads):
        allowed = f"a pattern for {num_heads} heads and {num_kv_heads} kv heads"
        raise refused("blocksparse", f"for {pattern.num_heads} heads and {pattern.num_kv_heads} kv heads", allowed)
    if parameters.attn_type is not AttentionType.DECODER:
        # A decoder's query has no position among an encoder's keys, so no window applies.
        crosses = parameters.attn_type is AttentionType.ENCODER_DECODER
        for name in (*(("sliding_window",) if crosses else ()), "attention_chunk_size", "blocksparse"):
            value = getattr(parameters, name)
            if value is not None:
                raise refused(name, value, f"none, for attention of type {parameters.attn_type}")


def check_backend(capabilities: BackendCapabilities, parameters: AttentionParameters, *, layer_index: int) -> None:
    """Raises ConfigError for features that this backend does not declare."""
    if capabilities.kind is not KVKind.GQA:
        raise ConfigError(
            f"{capabilities.name} reads caches of kind {capabilities.kind}, not keys and values",
            field="attention_backend",
            value=capabilities.name,
            cure="let the backend be selected for this model",
        )
    missing = sorted(asked_features(parameters) - capabilities.features)
    if missing:
        raise ConfigError(
            f"{capabilities.name} has no {', '.join(missing)}, which attention layer {layer_index} asks for",
            field="attention_backend",
            value=capabilities.name,
            cure="let the backend be selected for this model",
        )


def check_planned(attn_type: AttentionType, *, causal: bool) -> None:
    """Raises InternalError if the layer reads an encoder's keys but the batch was planned as causal. For backends that
    plan one kind of batch."""
    if causal and attn_type is not AttentionType.DECODER:
        raise InternalError(
            f"a layer of type {attn_type} in a batch that is causal",
            field="causal",
            value=causal,
            allowed=("False",),
            cure="give such layers metadata of their own, built from a batch that is not causal",
        )


def check_shared(planned: PerLayerParameters, layer: AttentionParameters) -> None:
    """Raises InternalError for a layer that the needs did not name. For backends that plan for all layers at once."""
    asked = per_layer_parameters(layer)
    if asked != planned:
        raise InternalError(
            f"a layer asks for {asked}, the batch is planned for {planned}",
            field="layers",
            value=asked,
            allowed=(str(planned),),
            cure="name every layer in the needs: then no backend is selected that plans for all layers at once",
        )


def check_heads(q_THD: Tensor, *, num_heads: int, head_size: int) -> None:
    """Raises InternalError for a layer that needs more memory than was allocated. For backends with memory for partial
    results."""
    asked_heads, asked_size = q_THD.shape[1:]
    if asked_heads > num_heads or asked_size > head_size:
        raise InternalError(
            f"a layer has {asked_heads} heads of {asked_size}, the backend was made for {num_heads} of {head_size}",
            field="num_heads",
            value=asked_heads,
            allowed=(f"up to {num_heads}, of up to {head_size} channels",),
            cure="give the largest layer's sizes in the needs",
        )


def check_out(out: Tensor, q_THD: Tensor, *, dtype: torch.dtype | None = None) -> None:
    """Raises InternalError for memory that cannot hold the result. `dtype` is the result's; None: the queries'."""
    for name, value, wanted in (
        ("shape", tuple(out.shape), tuple(q_THD.shape)),
        ("dtype", out.dtype, dtype or q_THD.dtype),
        ("device", out.device, q_THD.device),
        ("is_contiguous", out.is_contiguous(), True),
    ):
        if value != wanted:
            raise InternalError(f"out's {name} is {value}", field="out", value=value, allowed=(str(wanted),))


def refused(field: str, value: object, *allowed: str) -> ConfigError:
    return ConfigError(f"{field} is {value}", field=field, value=value, allowed=allowed)
