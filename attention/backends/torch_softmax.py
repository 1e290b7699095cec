"""Unfused attention in float32, for features that fused SDPA lacks: capped and biased scores, sinks, a pattern per
head, and queries that see no key.

Legend: K kv heads, G query heads per kv head, T queries, S keys, D key channels, V value channels; x any leading axes.
"""

import torch
from torch import Tensor

from attention.parameters import AttentionParameters


def needs_softmax(layer: AttentionParameters) -> bool:
    """Whether the layer needs a feature that fused SDPA lacks."""
    asked = (layer.logits_soft_cap, layer.alibi_slopes_H, layer.sinks_H, layer.blocksparse)
    return any(value is not None for value in asked)


def softmax_attention(
    q_xKGTD: Tensor,
    k_xKSD: Tensor,
    v_xKSV: Tensor,
    *,
    layer: AttentionParameters,
    distance_xTS: Tensor,
    unseen: Tensor | None,
) -> Tensor:
    """Returns [x, K, G, T, V] float32; 0 for a query that sees no key.

    Args:
        distance_xTS: key position minus query position.
        unseen: [x, K, G, T, S], or a shape that broadcasts to it; True where the query does not see the key.
    """
    heads = q_xKGTD.shape[-4:-2]
    # The query heads of a kv head are passed as queries, so that keys need not be repeated.
    scores_xKMS = (q_xKGTD.float() * layer.scale).flatten(-3, -2) @ k_xKSD.float().mT
    scores = scores_xKMS.unflatten(-2, (heads[1], -1))
    if layer.logits_soft_cap is not None:
        scores = layer.logits_soft_cap * torch.tanh(scores / layer.logits_soft_cap)
    if layer.alibi_slopes_H is not None:
        scores = scores + layer.alibi_slopes_H.view(*heads, 1, 1) * distance_xTS[..., None, None, :, :]
    if unseen is not None:
        scores = scores.masked_fill(unseen, -torch.inf)
    sinks_KG11 = None if layer.sinks_H is None else layer.sinks_H.view(*heads, 1, 1)
    highest = scores.amax(dim=-1, keepdim=True)
    if sinks_KG11 is not None:
        highest = torch.maximum(highest, sinks_KG11)
    # NOTE: -inf minus -inf is NaN, hence the clamp: a query without keys has weights exp(-inf) = 0.
    highest = highest.clamp_min(torch.finfo(torch.float32).min)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    if sinks_KG11 is not None:
        total = total + torch.exp(sinks_KG11 - highest)
    attended: Tensor = (weights.flatten(-3, -2) @ v_xKSV.float()).unflatten(-2, (heads[1], -1))
    return attended.div_(total.clamp_min(torch.finfo(torch.float32).tiny))
