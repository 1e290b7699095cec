"""The layer for multi-token prediction (MTP) that some checkpoints bring, which drafts tokens.

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
from baton.models.config.mtp import mtp_form
from baton.models.layers.norms import RMSNorm


class MTPLayer(nn.Module):
    """One MTP layer. Its modules have DeepSeek-V3's names. Checkpoints also store copies of the embedding and the head
    under its name, which are not read.

    Args:
        layer: the decoder layer within, in the form of the model's last layer; the first layer of its cache.
        norm: class of its norms.
    """

    def __init__(self, config: ModelConfig, layer: nn.Module, *, norm: type[RMSNorm], dtype: torch.dtype) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        form = mtp_form(config)
        self.hidden_first, self.before_last_norm = form.hidden_first, form.before_last_norm
        self.enorm = norm(size, eps=eps, dtype=dtype)
        self.hnorm = norm(size, eps=eps, dtype=dtype)
        # NOTE: torch's own class, because checkpoints with quantized weights leave this projection in bfloat16.
        self.eh_proj = nn.Linear(2 * size, size, bias=False, dtype=dtype)
        self.layer = layer
        self.shared_head = nn.Module()
        self.shared_head.norm = norm(size, eps=eps, dtype=dtype)

    def read(self, hidden_TD: Tensor, last_norm: RMSNorm) -> Tensor:
        """Returns what the layer reads of the model's hidden states [T,D].

        For a layer that reads the states before the model's last norm, this undoes the norm's weights. The length of a
        state stays 1, which changes nothing, because the layer begins with a norm of its own.

        Args:
            hidden_TD: states after the model's last norm.
        """
        if not self.before_last_norm:
            return hidden_TD
        weight_D = last_norm.weight + last_norm.weight_offset
        return hidden_TD / weight_D.masked_fill(weight_D == 0, torch.inf)  # a channel without weight is lost

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
            hidden_TD: hidden states of the model (`read`), or those that this layer returned.
            kv_cache: the layer's own.
        """
        halves = self.enorm(embedded_TD), self.hnorm(hidden_TD)
        stream_TD = self.eh_proj(torch.cat(halves[::-1] if self.hidden_first else halves, dim=-1))
        update_TD = self.layer(stream_TD, None, rotation, kv_cache, metadata)
        norm = self.shared_head.norm
        assert isinstance(norm, RMSNorm)
        return norm.add_and_norm(stream_TD, update_TD)
