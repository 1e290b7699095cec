"""Defines the parameters of one attention layer. It holds values only.

A score is, in this order: q.k * scale, capped, plus the ALiBi bias, or -inf where the query does not see the key.
Legend: H query heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from attention.blocksparse import BlocksparseParams
from baton.core.errors import ConfigError
from baton.kvcache.scales import KVScales


class AttentionType(StrEnum):
    """The kind of attention. DECODER: causal, over the cache. ENCODER and ENCODER_ONLY: every token of a request sees
    every other; the call brings all keys, and no cache is used. ENCODER_DECODER: decoder queries over an encoder's keys
    in the cache; not causal."""

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


@dataclass(frozen=True)
class AttentionParameters:
    """Everything besides sizes that defines the attention of one layer.

    Attributes:
        sliding_window: a token sees itself and the `sliding_window - 1` tokens before it, in an encoder also as many
            after it; None: it sees all.
        attention_chunk_size: chunked local attention: a token sees itself and earlier tokens of its own chunk. The
            chunks of a sequence are [0, size), [size, 2 * size), ...
        logits_soft_cap: scores become cap * tanh(score / cap).
        alibi_slopes_H: float32; slope * (key position - query position) is added to the score.
        sinks_H: float32; an extra score per head that takes part in the softmax and has no value.
        blocksparse: pattern of key blocks that each block of queries sees, per head.
        scales: of an fp8 cache, and of queries in fp8; None: 1.
    """

    scale: float
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    logits_soft_cap: float | None = None
    attn_type: AttentionType = AttentionType.DECODER
    alibi_slopes_H: Tensor | None = None
    sinks_H: Tensor | None = None
    blocksparse: BlocksparseParams | None = None
    scales: KVScales | None = None


@dataclass(frozen=True)
class PerLayerParameters:
    """The parameters that some backends need before the first layer runs, equal in all layers.

    window_left: number of tokens before itself that a token sees; -1: all.
    """

    window_left: int
    logits_soft_cap: float | None
    sm_scale: float


def get_per_layer_parameters(layers: Mapping[str, AttentionParameters]) -> dict[str, PerLayerParameters]:
    """Returns each layer's parameters, by layer name, for `infer_global_hyperparameters`."""
    return {name: per_layer_parameters(layer) for name, layer in layers.items()}


def per_layer_parameters(layer: AttentionParameters) -> PerLayerParameters:
    return PerLayerParameters(
        window_left=-1 if layer.sliding_window is None else layer.sliding_window - 1,
        logits_soft_cap=layer.logits_soft_cap,
        sm_scale=layer.scale,
    )


def infer_global_hyperparameters(per_layer: Mapping[str, PerLayerParameters]) -> PerLayerParameters:
    """Returns the parameters that all layers share.

    Raises:
        ConfigError: there are no layers, or they disagree; names the layers on each side.
    """
    groups: dict[PerLayerParameters, list[str]] = {}
    for name, parameters in per_layer.items():
        groups.setdefault(parameters, []).append(name)
    if len(groups) == 1:
        return next(iter(groups))
    if not groups:
        raise ConfigError("the model has no attention layers", field="layers", value=())
    described = "; ".join(f"{parameters} in {', '.join(names)}" for parameters, names in groups.items())
    raise ConfigError(
        f"layers disagree about parameters that this backend needs to be equal in all: {described}",
        field="layers",
        value=tuple(per_layer),
        cure="take a backend that reads these parameters per layer, such as TRITON_ATTN",
    )
