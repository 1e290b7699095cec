"""A decoder-only language model around one family's layers: embedding, layers, last norm, head.

The residual stream is one tensor that is changed in place: a layer returns what is to be added to it, because the norm
that reads the sum adds in the same pass. Knows no family and no request. Shapes: T token of the batch, D hidden
channel, R row that wants logits, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn

from attention.cache import PagedKVCache
from attention.metadata import AttentionMetadata
from attention.rotation import Rotation
from models.config import ModelConfig
from models.layers import Embedding, RMSNorm
from models.linear import Linear
from models.rotary import Rotary


class DecoderLayer(nn.Module):
    """Attention and an MLP, each behind a norm and added to the residual stream. Families make the parts."""

    input_layernorm: RMSNorm
    self_attn: nn.Module
    post_attention_layernorm: RMSNorm
    mlp: nn.Module

    def forward(
        self,
        stream_TD: Tensor,
        update_TD: Tensor | None,
        rotation: Rotation,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Adds `update_TD` of the layer before to the stream, and its own attention's; its MLP's is the result."""
        normed_TD = self.input_layernorm.add_and_norm(stream_TD, update_TD)
        attended_TD = self.self_attn(normed_TD, rotation, kv_cache, metadata)
        out_TD: Tensor = self.mlp(self.post_attention_layernorm.add_and_norm(stream_TD, attended_TD))
        return out_TD


class Decoder(nn.Module):
    """What most checkpoints keep under `model.`."""

    def __init__(
        self, config: ModelConfig, layers: Sequence[nn.Module], *, norm: nn.Module, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(layers)
        self.norm = norm


class CausalLM(nn.Module):
    """Module paths equal the tensor names of checkpoints, apart from `FusedLinear` and `Experts`, which name theirs,
    and from `checkpoint_prefixes`. Families whose layers are called otherwise have their own `forward`.

    Args:
        norm: behind the last layer; None is an RMS norm.

    Attributes:
        checkpoint_prefixes: what paths begin with here, and in checkpoints.
        rotary: None where the config has no rotary embedding.
    """

    checkpoint_prefixes: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def __init__(
        self, config: ModelConfig, layers: Sequence[nn.Module], *, dtype: torch.dtype, norm: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.config = config
        norm = norm or RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.model = Decoder(config, layers, norm=norm, dtype=dtype)
        self.rotary = None if config.rope is None else Rotary(config.rope)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Linear(config.hidden_size, config.vocab_size, dtype=dtype)

    def forward(
        self, token_ids_T: Tensor, positions_T: Tensor, kv_cache: PagedKVCache, metadata: AttentionMetadata
    ) -> Tensor:
        """Hidden states [T,D] of a flat batch; writes the batch's KV into `kv_cache`.

        Args:
            positions_T: below `config.max_context_tokens`.
            metadata: what the attention backend that the model was loaded with planned for this batch.
        """
        assert self.rotary is not None
        rotation = self.rotary(positions_T)
        stream_TD: Tensor = self.model.embed_tokens(token_ids_T)
        update_TD: Tensor | None = None
        for layer in self.model.layers:
            update_TD = layer(stream_TD, update_TD, rotation, kv_cache, metadata)
        assert isinstance(self.model.norm, RMSNorm)
        return self.model.norm.add_and_norm(stream_TD, update_TD)

    def compute_logits(self, hidden_RD: Tensor) -> Tensor:
        """Logits [R,V], float32, of the rows that are to be sampled."""
        head = self.model.embed_tokens.as_head if self.lm_head is None else self.lm_head
        logits_RV: Tensor = head(hidden_RD).float()
        cap = self.config.final_logits_soft_cap
        return logits_RV if cap is None else cap * torch.tanh(logits_RV / cap)
