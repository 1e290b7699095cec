"""Prefills of the latent backends: memory for one chunk of context, and attention over decompressed keys and values by
our kernel."""

import torch
from torch import Tensor

from attention.backend import AttentionNeeds, RaggedLens
from attention.kernels.paged.attend import ragged_attention
from baton.core.errors import ConfigError
from baton.kvcache.cache import TORCH_DTYPES


def new_workspace(needs: AttentionNeeds, context_workspace_tokens: int) -> Tensor:
    """Allocates [tokens, latent plus rotary channels] in the model's dtype.

    Raises:
        ConfigError: `context_workspace_tokens` is below 1.
    """
    if context_workspace_tokens < 1:
        raise ConfigError(
            f"context_workspace_tokens is {context_workspace_tokens}",
            field="context_workspace_tokens",
            value=context_workspace_tokens,
            allowed=("an integer of at least 1",),
        )
    return torch.empty(context_workspace_tokens, needs.head_size, dtype=TORCH_DTYPES[needs.dtype], device=needs.device)


def attend_decompressed(
    q_THD: Tensor,
    k_SHD: Tensor,
    v_SHV: Tensor,
    *,
    lens: RaggedLens,
    causal: bool,
    scale: float,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Implements `MLABackend.attend` by our kernel."""
    num_queries, num_heads, _ = q_THD.shape
    if out is None:
        out = q_THD.new_empty(num_queries, num_heads, v_SHV.shape[-1])
    lse_HT = q_THD.new_empty(num_heads, num_queries, dtype=torch.float32)
    ragged_attention(
        q_THD,
        k_SHD,
        v_SHV,
        query_start_loc=lens.query_start_loc,
        key_start_loc=lens.key_start_loc,
        max_query_len=lens.max_query_len,
        causal=causal,
        scale=scale,
        out=out,
        lse_HT=lse_HT,
    )
    return out, lse_HT
