"""Determines a model's needs: its dtype, its cache, and the features that attention backends must support."""

from dataclasses import replace
from types import MappingProxyType

import torch

from attention.backend import AttentionFeature, AttentionNeeds, MLADims
from attention.parameters import AttentionParameters
from baton.core.errors import ConfigError
from baton.kvcache.spec import DTYPE_BYTES, KVCacheShape, KVCacheSpec, KVKind
from baton.models.config.model_config import GQAConfig, MLAConfig, ModelConfig
from baton.models.config.mtp import mtp_config
from baton.models.families.table import family_of


def resolve_dtype(config: ModelConfig, dtype: str, *, device_type: str) -> str:
    """Returns the dtype that the model runs in.

    "auto" is float32 on a CPU, else the checkpoint's dtype, or bfloat16 if the family overflows in that.

    Raises:
        ConfigError: there is no such dtype, or the family overflows in it.
    """
    allowed = ("auto", *DTYPE_BYTES)
    overflows = family_of(config.architecture).overflows_float16
    if dtype == "auto":
        stored = "bfloat16" if overflows and config.dtype == "float16" else config.dtype
        return "float32" if device_type == "cpu" else stored
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype is {dtype!r}", field="dtype", value=dtype, allowed=allowed)
    if dtype == "float16" and overflows:
        raise ConfigError(
            f"dtype is float16, in which {config.architecture} overflows",
            field="dtype",
            value=dtype,
            allowed=tuple(name for name in allowed if name != dtype),
            cure="take bfloat16, which has float32's range",
        )
    return dtype


def kv_cache_spec(config: ModelConfig, dtype: str, kv_dtype: str = "") -> KVCacheSpec:
    """Returns what the cache keeps of a request for a model in `dtype`. `kv_dtype` is the cache's dtype; "" means
    `dtype`."""
    spec = _kv_cache_spec(config, dtype, kv_dtype)
    if not config.has_draft_layer:
        return spec
    layer = mtp_config(config) if config.eagle is None else config.eagle.layer
    return replace(spec, draft=_kv_cache_spec(layer, dtype, kv_dtype))


def _kv_cache_spec(config: ModelConfig, dtype: str, kv_dtype: str) -> KVCacheSpec:
    attention, recurrent = config.attention, config.recurrent
    state = None
    if recurrent is not None:
        state = KVCacheSpec(KVKind.STATE, recurrent.num_layers, recurrent.num_heads, recurrent.head_channels, "float32")
    if isinstance(attention, MLAConfig):
        channels = attention.kv_lora_rank + attention.qk_rope_head_dim
        num_layers = config.num_layers * config.attentions_per_layer
        if recurrent is not None:
            num_layers = sum(recurrent.kv_layers)
        index = None
        if attention.index is not None:
            num_indexers = sum(attention.index.layers)
            index = KVCacheSpec(KVKind.MLA, num_indexers, 1, attention.index.head_dim, kv_dtype or dtype)
        return KVCacheSpec(KVKind.MLA, num_layers, 1, channels, kv_dtype or dtype, index=index, state=state)
    # Layers that read another layer's KV come last and have no place in the cache. If layers' heads differ, every layer
    # gets the size of the largest (`attention.layer` has the reason).
    num_layers = attention.num_kv_layers
    has_kv = (True,) * num_layers if recurrent is None else recurrent.kv_layers
    windows = tuple(
        window or 0 for window, keeps in zip(attention.sliding_windows[:num_layers], has_kv, strict=True) if keeps
    )
    return KVCacheSpec(
        kind=KVKind.GQA,
        num_layers=len(windows),
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        dtype=kv_dtype or dtype,
        windows=windows if any(windows) else (),
        state=state,
    )


def attention_needs(
    config: ModelConfig,
    *,
    dtype: str,
    device: torch.device | str,
    shape: KVCacheShape,
    kv_dtype: str = "",
    max_num_reqs: int,
    max_num_tokens: int = 8192,
    batch_invariant: bool = False,
) -> AttentionNeeds:
    """Returns the needs that a backend must meet to serve the model over a cache of `shape`.

    Args:
        kv_dtype: of the cache; "" means `dtype`.
        max_num_reqs, max_num_tokens: most requests and most new tokens in one batch.
        batch_invariant: a request's result must have the same bits alone and in any batch.
    """
    spec = kv_cache_spec(config, dtype, kv_dtype)
    attention = config.attention
    layers = {f"layers.{index}": _layer_parameters(config, index) for index in range(config.num_layers)}
    return AttentionNeeds(
        kind=spec.kind,
        device=str(device),
        dtype=dtype,
        head_size=spec.head_dim,
        block_size=shape.block_size,
        layout=shape.layout,
        features=_features(attention),
        kv_dtype=kv_dtype,
        num_heads=attention.num_heads,
        num_kv_heads=spec.num_kv_heads,
        max_num_reqs=max_num_reqs,
        max_num_tokens=max_num_tokens,
        batch_invariant=batch_invariant,
        max_model_len=min(config.max_context_tokens, shape.num_slots),
        layers=MappingProxyType(layers),
        mla=_mla_dims(attention) if isinstance(attention, MLAConfig) else None,
    )


def _features(attention: GQAConfig | MLAConfig) -> frozenset[AttentionFeature]:
    if isinstance(attention, MLAConfig):
        return frozenset() if attention.index is None else frozenset({AttentionFeature.SPARSE})
    gqa = attention
    needed = {
        AttentionFeature.SLIDING_WINDOW: any(gqa.sliding_windows),
        AttentionFeature.CHUNKED_LOCAL: any(gqa.attention_chunk_sizes),
        AttentionFeature.SOFT_CAP: gqa.logits_soft_cap is not None,
        AttentionFeature.ALIBI: bool(gqa.alibi_slopes),
        AttentionFeature.SINKS: gqa.sinks,
        AttentionFeature.BLOCK_SPARSE: any(gqa.blocksparse),
        AttentionFeature.UNEQUAL_HEADS: len(set(gqa.layer_heads)) > 1,
    }
    return frozenset(feature for feature, is_needed in needed.items() if is_needed)


def _layer_parameters(config: ModelConfig, layer_index: int) -> AttentionParameters:
    attention = config.attention
    if isinstance(attention, MLAConfig):
        return AttentionParameters(scale=config.attention_scale)
    return AttentionParameters(
        scale=attention.scale,
        sliding_window=attention.sliding_windows[layer_index],
        attention_chunk_size=attention.attention_chunk_sizes[layer_index] if attention.attention_chunk_sizes else None,
        logits_soft_cap=attention.logits_soft_cap,
        blocksparse=attention.blocksparse[layer_index] if attention.blocksparse else None,
    )


def _mla_dims(mla: MLAConfig) -> MLADims:
    return MLADims(
        qk_nope_head_dim=mla.qk_nope_head_dim,
        qk_rope_head_dim=mla.qk_rope_head_dim,
        v_head_dim=mla.v_head_dim,
        kv_lora_rank=mla.kv_lora_rank,
        top_k=0 if mla.index is None else mla.index.top_k,
    )
