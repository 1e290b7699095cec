"""Attention of one layer over the paged cache: writes the new keys and values, then attends.

Holds no weights, no cache and no batch: cache and metadata come with each call. Legend: T tokens, H heads, D head_dim.
"""

import torch
from torch import Tensor, nn

from attention.backend import AttentionBackend
from attention.cache import PagedKVCache
from attention.cache_ops import store_kv
from attention.metadata import AttentionMetadata
from attention.parameters import AttentionParameters
from baton.errors import ConfigError


class Attention(nn.Module):
    """Multi-head, grouped-query or multi-query attention, as the head counts say.

    Args:
        scale: what scores are multiplied by.
        sliding_window: a token sees itself and the `sliding_window - 1` before it; None: all before it.

    Raises:
        ConfigError: the kv heads do not divide the heads, or the window is below 1.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        layer_index: int,
        backend: AttentionBackend,
        sliding_window: int | None = None,
    ) -> None:
        super().__init__()
        if num_heads % num_kv_heads:
            raise ConfigError(
                f"num_kv_heads is {num_kv_heads}",
                field="num_kv_heads",
                value=num_kv_heads,
                allowed=(f"a divisor of num_heads ({num_heads})",),
            )
        if sliding_window is not None and sliding_window < 1:
            raise ConfigError(
                f"sliding_window is {sliding_window}",
                field="sliding_window",
                value=sliding_window,
                allowed=("an integer of at least 1", "none"),
            )
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = scale
        self.layer_index = layer_index
        self.backend = backend
        self.sliding_window = sliding_window
        self.asked = AttentionParameters(scale=scale, sliding_window=sliding_window)

    def forward(
        self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, kv_cache: PagedKVCache, metadata: AttentionMetadata
    ) -> Tensor:
        """[T, H, D]; rows past the batch's actual tokens hold anything."""
        kv_layer = kv_cache.layer(self.layer_index)
        store_kv(kv_layer, k_THD, v_THD, metadata.new_tokens)
        out = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        self.backend.forward(q_THD, k_THD, v_THD, kv_layer, metadata, layer=self.asked, out=out)
        return out

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, "
            f"layer_index={self.layer_index}, sliding_window={self.sliding_window}, "
            f"backend={self.backend.capabilities.name}"
        )
