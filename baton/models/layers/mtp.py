"""The layer for multi-token prediction (MTP) that checkpoints in DeepSeek-V3's form bring, which drafts tokens.

At position i it reads the model's hidden state after token i and the embedding of token i + 1, and predicts token
i + 2 with the model's own head. Its KV for position i therefore depends on token i + 1; it is a part of the cache of
its own (`KVCacheSpec.draft`), in the same blocks as the model's. Further tokens are drafted by the same layer: its own
hidden state takes the place of the model's.

This module owns the layer's computation (arXiv 2412.19437, equations 21 to 23). Which tokens are drafted, and when, is
for `baton.engine`. Shapes: T token, D hidden channel.
"""

import torch
from torch import Tensor, nn

from attention.metadata import AttentionMetadata
from attention.rotation import Rotation
from baton.kvcache.cache import PagedKVCache
from baton.models.config.model_config import ModelConfig
from baton.models.layers.norms import RMSNorm

# Our paths of the layer's modules, and how checkpoints name them after the model's last layer. The first match counts.
_PREFIXES = (("mtp.layer.", ""), ("mtp.", ""))


def mtp_prefixes(num_layers: int) -> dict[str, str]:
    """Returns the prefixes of module paths, and those of the layer's tensors in checkpoints."""
    return {ours: f"model.layers.{num_layers}.{theirs}" for ours, theirs in _PREFIXES}


class MTPLayer(nn.Module):
    """One MTP layer. Checkpoints also store copies of the embedding and the head under its name, which are not read.

    Args:
        layer: the decoder layer within, in the form of the model's last layer; the first layer of its cache.
    """

    def __init__(self, config: ModelConfig, layer: nn.Module, *, dtype: torch.dtype) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.enorm = RMSNorm(size, eps=eps, dtype=dtype)
        self.hnorm = RMSNorm(size, eps=eps, dtype=dtype)
        # NOTE: torch's own class, because checkpoints with quantized weights leave this projection in bfloat16.
        self.eh_proj = nn.Linear(2 * size, size, bias=False, dtype=dtype)
        self.layer = layer
        self.shared_head = nn.Module()
        self.shared_head.norm = RMSNorm(size, eps=eps, dtype=dtype)

    def forward(
        self,
        embedded_TD: Tensor,
        hidden_TD: Tensor,
        rotation: Rotation,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Returns hidden states [T,D], from which the model's head predicts tokens. Writes the layer's KV.

        Args:
            embedded_TD: the embedding of each position's next token.
            hidden_TD: hidden states of the model after its last norm, or those that this layer returned.
            kv_cache: the layer's own.
        """
        joined_TX = torch.cat((self.enorm(embedded_TD), self.hnorm(hidden_TD)), dim=-1)
        stream_TD = self.eh_proj(joined_TX)
        update_TD = self.layer(stream_TD, None, rotation, kv_cache, metadata)
        norm = self.shared_head.norm
        assert isinstance(norm, RMSNorm)
        return norm.add_and_norm(stream_TD, update_TD)
